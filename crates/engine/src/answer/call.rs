//! Reads one call.

use serde_json::Value;

/// The keys of the arguments in all formats.
const ARGUMENTS: [&str; 2] = ["arguments", "parameters"];

/// What a character means for the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Read {
    /// The call goes on.
    More,
    /// The call ends with this character.
    Done,
    /// This is no call.
    Bad,
}

#[derive(Debug)]
enum Stage {
    /// Before a key.
    Key,
    InKey(JsonScanner),
    Colon,
    Value,
    /// In a value other than an object of arguments.
    InValue(JsonScanner),
    /// Before the arguments of a call whose name stands before them.
    NamedArguments,
    /// In an object of arguments.
    InArguments {
        scanner: JsonScanner,
        /// Whether the call ends with the arguments.
        ends: bool,
    },
    /// After a value.
    Comma,
}

/// One call while it is read: an object of name and arguments, or arguments after a name.
#[derive(Debug)]
pub(super) struct CallReader {
    stage: Stage,
    /// The text of the current key or value.
    token: String,
    key: String,
    name: Option<String>,
    /// The arguments' text that was read and not taken.
    arguments: String,
    has_arguments: bool,
    /// Whether a call without arguments is one.
    may_lack_arguments: bool,
}

impl CallReader {
    /// A reader after the `{` of an object.
    pub(super) fn object(may_lack_arguments: bool) -> Self {
        Self::new(Stage::Key, None, may_lack_arguments)
    }

    /// A reader of the arguments of a function.
    pub(super) fn named(name: String) -> Self {
        Self::new(Stage::NamedArguments, Some(name), false)
    }

    fn new(stage: Stage, name: Option<String>, may_lack_arguments: bool) -> Self {
        let (token, key, arguments) = (String::new(), String::new(), String::new());
        let has_arguments = false;
        Self { stage, token, key, name, arguments, has_arguments, may_lack_arguments }
    }

    /// The function, when it is known.
    pub(super) fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// The length in bytes of the arguments that were not taken.
    pub(super) fn waiting(&self) -> usize {
        self.arguments.len()
    }

    /// Whether the arguments are being read, so that their text is certain.
    pub(super) fn is_in_arguments(&self) -> bool {
        matches!(self.stage, Stage::InArguments { .. })
    }

    /// Takes the arguments' text so far.
    pub(super) fn take_arguments(&mut self) -> String {
        std::mem::take(&mut self.arguments)
    }

    /// Adds a character. `knows` is whether a function exists.
    pub(super) fn push(&mut self, c: char, knows: impl Fn(&str) -> bool) -> Read {
        match &mut self.stage {
            Stage::Key | Stage::Colon | Stage::Value | Stage::NamedArguments | Stage::Comma
                if matches!(c, ' ' | '\n' | '\r' | '\t') =>
            {
                Read::More
            }
            Stage::Key if c == '"' => self.begin(c, Stage::InKey),
            Stage::Key => Read::Bad,
            Stage::InKey(scanner) => {
                self.token.push(c);
                match scanner.push(c) {
                    Scan::More => Read::More,
                    Scan::Done => match serde_json::from_str(&self.token) {
                        Ok(key) => {
                            self.key = key;
                            if self.is_repeated() { Read::Bad } else { self.go(Stage::Colon) }
                        }
                        Err(_) => Read::Bad,
                    },
                    Scan::Over | Scan::Bad => Read::Bad,
                }
            }
            Stage::Colon if c == ':' => self.go(Stage::Value),
            Stage::Colon => Read::Bad,
            Stage::Value if c == '{' && ARGUMENTS.contains(&self.key.as_str()) => {
                self.begin_arguments(false)
            }
            Stage::Value => self.begin(c, Stage::InValue),
            Stage::InValue(scanner) => match scanner.push(c) {
                Scan::More => {
                    self.token.push(c);
                    Read::More
                }
                Scan::Done => {
                    self.token.push(c);
                    self.end_value(knows)
                }
                Scan::Over => match self.end_value(knows) {
                    Read::More => self.comma(c),
                    other => other,
                },
                Scan::Bad => Read::Bad,
            },
            Stage::NamedArguments if c == '{' => self.begin_arguments(true),
            Stage::NamedArguments => Read::Bad,
            Stage::InArguments { scanner, ends } => {
                self.arguments.push(c);
                match (scanner.push(c), *ends) {
                    (Scan::More, _) => Read::More,
                    (Scan::Done, true) => Read::Done,
                    (Scan::Done, false) => self.go(Stage::Comma),
                    (Scan::Over | Scan::Bad, _) => Read::Bad,
                }
            }
            Stage::Comma => self.comma(c),
        }
    }

    /// Whether the key says again what the call has already. The first arguments may have been sent, so
    /// others cannot replace them.
    fn is_repeated(&self) -> bool {
        let is_arguments = ARGUMENTS.contains(&self.key.as_str());
        self.key == "name" && self.name.is_some() || is_arguments && self.has_arguments
    }

    fn go(&mut self, stage: Stage) -> Read {
        self.stage = stage;
        Read::More
    }

    /// Begins a key or value with its first character.
    fn begin(&mut self, c: char, stage: impl FnOnce(JsonScanner) -> Stage) -> Read {
        self.token.clear();
        self.token.push(c);
        let mut scanner = JsonScanner::new();
        match scanner.push(c) {
            Scan::More => self.go(stage(scanner)),
            _ => Read::Bad,
        }
    }

    fn begin_arguments(&mut self, ends: bool) -> Read {
        self.has_arguments = true;
        self.arguments.clear();
        self.arguments.push('{');
        let mut scanner = JsonScanner::new();
        scanner.push('{');
        self.go(Stage::InArguments { scanner, ends })
    }

    /// The value of a key has ended.
    fn end_value(&mut self, knows: impl Fn(&str) -> bool) -> Read {
        if self.key == "name" {
            let name = serde_json::from_str::<String>(&self.token).ok().filter(|name| knows(name));
            self.name = name;
            if self.name.is_none() {
                return Read::Bad;
            }
        } else if ARGUMENTS.contains(&self.key.as_str()) {
            let Some(arguments) = other_arguments(&self.token) else { return Read::Bad };
            (self.arguments, self.has_arguments) = (arguments, true);
        }
        self.go(Stage::Comma)
    }

    fn comma(&mut self, c: char) -> Read {
        match c {
            ' ' | '\n' | '\r' | '\t' => self.go(Stage::Comma),
            ',' => self.go(Stage::Key),
            '}' if self.name.is_some() && self.has_arguments => Read::Done,
            '}' if self.name.is_some() && self.may_lack_arguments => {
                "{}".clone_into(&mut self.arguments);
                Read::Done
            }
            _ => Read::Bad,
        }
    }
}

/// Arguments that are no object: some models write it as a text, or null for a function without any.
fn other_arguments(json: &str) -> Option<String> {
    match serde_json::from_str(json).ok()? {
        Value::Null => Some("{}".to_owned()),
        Value::String(text) => {
            let is_object = matches!(serde_json::from_str(&text), Ok(Value::Object(_)));
            is_object.then_some(text)
        }
        _ => None,
    }
}

// Recognizes one JSON value, character by character.

/// Nested objects and lists beyond this depth are refused, as serde_json does.
const DEEPEST: usize = 127;

/// What a character means for the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scan {
    /// The value goes on.
    More,
    /// The value ends with this character.
    Done,
    /// The value ended before this character.
    Over,
    /// The text is not JSON.
    Bad,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Container {
    Object,
    List,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Digits {
    /// After the sign.
    Sign,
    /// After a leading 0.
    Zero,
    Whole,
    /// After the point.
    Point,
    Fraction,
    /// After `e`.
    Exponent,
    /// After the sign of the exponent.
    ExponentSign,
    Power,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    /// A value.
    Value,
    /// A value, or the end of the list.
    Item,
    /// A key, or the end of the object.
    FirstKey,
    /// A key.
    Key,
    Colon,
    /// A comma, or the end of the object or list.
    Comma,
    /// More of a text, which may be a key.
    Text {
        key: bool,
    },
    /// The character after a backslash.
    Escape {
        key: bool,
    },
    /// Hexadecimal digits of an escape.
    Hex {
        key: bool,
        left: u8,
    },
    Number(Digits),
    /// The rest of `true`, `false` or `null`.
    Literal(&'static str),
}

/// Reads one value. White space before it is accepted.
#[derive(Debug)]
pub(super) struct JsonScanner {
    expected: Expected,
    open: Vec<Container>,
}

impl JsonScanner {
    pub(super) fn new() -> Self {
        Self { expected: Expected::Value, open: Vec::new() }
    }

    /// Adds a character. After an answer other than [`Scan::More`] the value has ended.
    pub(super) fn push(&mut self, c: char) -> Scan {
        let is_space = matches!(c, ' ' | '\n' | '\r' | '\t');
        match self.expected {
            Expected::Value | Expected::Item | Expected::FirstKey | Expected::Key if is_space => {
                Scan::More
            }
            Expected::Colon | Expected::Comma if is_space => Scan::More,
            Expected::Item if c == ']' => self.close(),
            Expected::Value | Expected::Item => self.begin(c),
            Expected::FirstKey if c == '}' => self.close(),
            Expected::FirstKey | Expected::Key if c == '"' => self.go(Expected::Text { key: true }),
            Expected::Colon if c == ':' => self.go(Expected::Value),
            Expected::Comma => self.separate(c),
            Expected::FirstKey | Expected::Key | Expected::Colon => Scan::Bad,
            Expected::Text { key } => match c {
                '"' if key => self.go(Expected::Colon),
                '"' => self.end(),
                '\\' => self.go(Expected::Escape { key }),
                c if u32::from(c) < 0x20 => Scan::Bad,
                _ => Scan::More,
            },
            Expected::Escape { key } => match c {
                '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' => self.go(Expected::Text { key }),
                'u' => self.go(Expected::Hex { key, left: 4 }),
                _ => Scan::Bad,
            },
            Expected::Hex { key, left } => match (c.is_ascii_hexdigit(), left) {
                (false, _) => Scan::Bad,
                (true, 1) => self.go(Expected::Text { key }),
                (true, _) => self.go(Expected::Hex { key, left: left - 1 }),
            },
            Expected::Number(digits) => self.number(digits, c),
            Expected::Literal(rest) => match rest.strip_prefix(c) {
                Some("") => self.end(),
                Some(rest) => self.go(Expected::Literal(rest)),
                None => Scan::Bad,
            },
        }
    }

    fn go(&mut self, expected: Expected) -> Scan {
        self.expected = expected;
        Scan::More
    }

    /// The first character of a value.
    fn begin(&mut self, c: char) -> Scan {
        match c {
            '"' => self.go(Expected::Text { key: false }),
            '{' => self.enter(Container::Object, Expected::FirstKey),
            '[' => self.enter(Container::List, Expected::Item),
            '-' => self.go(Expected::Number(Digits::Sign)),
            '0' => self.go(Expected::Number(Digits::Zero)),
            '1'..='9' => self.go(Expected::Number(Digits::Whole)),
            't' => self.go(Expected::Literal("rue")),
            'f' => self.go(Expected::Literal("alse")),
            'n' => self.go(Expected::Literal("ull")),
            _ => Scan::Bad,
        }
    }

    fn enter(&mut self, container: Container, expected: Expected) -> Scan {
        self.open.push(container);
        if self.open.len() > DEEPEST { Scan::Bad } else { self.go(expected) }
    }

    /// The character after a value in an object or list.
    fn separate(&mut self, c: char) -> Scan {
        match (c, self.open.last()) {
            (',', Some(Container::Object)) => self.go(Expected::Key),
            (',', Some(Container::List)) => self.go(Expected::Value),
            ('}', Some(Container::Object)) | (']', Some(Container::List)) => self.close(),
            _ => Scan::Bad,
        }
    }

    fn close(&mut self) -> Scan {
        self.open.pop();
        self.end()
    }

    /// A value has ended.
    fn end(&mut self) -> Scan {
        self.expected = Expected::Comma;
        if self.open.is_empty() { Scan::Done } else { Scan::More }
    }

    fn number(&mut self, digits: Digits, c: char) -> Scan {
        let next = match (digits, c) {
            (Digits::Sign, '0') => Digits::Zero,
            (Digits::Sign, '1'..='9') | (Digits::Whole, '0'..='9') => Digits::Whole,
            (Digits::Zero | Digits::Whole, '.') => Digits::Point,
            (Digits::Point | Digits::Fraction, '0'..='9') => Digits::Fraction,
            (Digits::Zero | Digits::Whole | Digits::Fraction, 'e' | 'E') => Digits::Exponent,
            (Digits::Exponent, '+' | '-') => Digits::ExponentSign,
            (Digits::Exponent | Digits::ExponentSign | Digits::Power, '0'..='9') => Digits::Power,
            (Digits::Zero | Digits::Whole | Digits::Fraction | Digits::Power, c) => {
                // The number ended before this character.
                return match self.end() {
                    Scan::Done => Scan::Over,
                    _ => self.push(c),
                };
            }
            _ => return Scan::Bad,
        };
        self.go(Expected::Number(next))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde::de::IgnoredAny;

    use super::*;

    /// The length in bytes of the value at the beginning of `text`; `None` if there is none.
    fn value_length(text: &str) -> Option<usize> {
        let mut scanner = JsonScanner::new();
        for (at, c) in text.char_indices() {
            match scanner.push(c) {
                Scan::More => {}
                Scan::Done => return Some(at + c.len_utf8()),
                Scan::Over => return Some(at),
                Scan::Bad => return None,
            }
        }
        None
    }

    #[test]
    fn values_end_where_they_end() {
        let cases = [
            (r#"{"a": [1, -0.5e+3, "x\"\u00e9}", {}, []]} rest"#, Some(41)),
            ("[] x", Some(2)),
            ("true,", Some(4)),
            ("-12.5, 3", Some(5)),
            ("0]", Some(1)),
            ("{\"a\" 1}", None),
            ("{a: 1}", None),
            ("{'a': 1}", None),
            ("[1,]", None),
            ("{\"a\": 1,}", None),
            ("[1}", None),
            ("01 ", Some(1)),
            ("[01]", None),
            ("\"a\nb\"", None),
            ("\"\\x\"", None),
            ("1.", None),
            ("nul ", None),
        ];
        for (text, length) in cases {
            assert_eq!(value_length(text), length, "{text}");
        }
        assert_eq!(value_length(&"[".repeat(200)), None);
        let deep = format!("{}{}", "[".repeat(127), "]".repeat(127));
        assert_eq!(value_length(&deep), Some(254));
    }

    proptest! {
        #[test]
        fn accepts_exactly_what_serde_json_accepts(
            text in r#"[{\["a0-](?:[{}\[\]",:a0-2.eE+ tru\\u]|true|null|"k": ?){0,14}"#,
        ) {
            // A space ends a number at the end of the text.
            let padded = format!("{text} ");
            let whole = value_length(&padded).is_some_and(|n| padded[n..].trim().is_empty());
            prop_assert_eq!(whole, serde_json::from_str::<IgnoredAny>(&text).is_ok());
        }
    }
}
