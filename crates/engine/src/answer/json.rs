//! Recognizes one JSON value, character by character.

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
