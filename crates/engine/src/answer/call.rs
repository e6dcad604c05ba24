//! Reads one call.

use serde_json::Value;

use super::json::{JsonScanner, Scan};

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
