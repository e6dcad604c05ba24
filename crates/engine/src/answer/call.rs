//! Reads one call.

use actson::feeder::PushJsonFeeder;
use actson::{JsonEvent, JsonParser};
use serde_json::Value;

/// The keys of the arguments in all formats.
const ARGUMENTS: [&str; 2] = ["arguments", "parameters"];

/// Nested objects and lists beyond this depth are refused, as serde_json does.
const DEEPEST: usize = 127;

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

/// One call while it is read: an object of name and arguments, or arguments after a name.
pub(super) struct CallReader {
    parser: JsonParser<PushJsonFeeder>,
    /// Objects and lists that are open.
    depth: usize,
    /// The depth of the arguments: 2 within an object, 1 after a name.
    arguments_depth: usize,
    /// The last key of the object.
    key: String,
    name: Option<String>,
    /// The arguments' text that was read and not taken.
    arguments: String,
    has_arguments: bool,
    is_in_arguments: bool,
    /// Whether a call without arguments is one.
    may_lack_arguments: bool,
}

impl CallReader {
    /// A reader after the `{` of an object.
    pub(super) fn object(may_lack_arguments: bool) -> Self {
        let mut reader = Self { may_lack_arguments, ..Self::new(None, 2) };
        // Begins the object.
        reader.push('{', |_| false);
        reader
    }

    /// A reader of the arguments of a function.
    pub(super) fn named(name: String) -> Self {
        Self::new(Some(name), 1)
    }

    fn new(name: Option<String>, arguments_depth: usize) -> Self {
        Self {
            parser: JsonParser::new(PushJsonFeeder::new()),
            depth: 0,
            arguments_depth,
            key: String::new(),
            name,
            arguments: String::new(),
            has_arguments: false,
            is_in_arguments: false,
            may_lack_arguments: false,
        }
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
        self.is_in_arguments
    }

    /// Takes the arguments' text so far.
    pub(super) fn take_arguments(&mut self) -> String {
        std::mem::take(&mut self.arguments)
    }

    /// Adds a character. `knows` is whether a function exists.
    pub(super) fn push(&mut self, c: char, knows: impl Fn(&str) -> bool) -> Read {
        if self.depth == 0 && !matches!(c, '{' | ' ' | '\n' | '\r' | '\t') {
            return Read::Bad;
        }
        if self.is_in_arguments {
            self.arguments.push(c);
        }
        self.parser.feeder.push_bytes(c.encode_utf8(&mut [0; 4]).as_bytes());
        loop {
            let read = match self.parser.next_event() {
                Ok(Some(JsonEvent::NeedMoreInput)) => return Read::More,
                Ok(Some(event)) => self.event(event, &knows),
                Ok(None) | Err(_) => Read::Bad,
            };
            if read != Read::More {
                return read;
            }
        }
    }

    fn event(&mut self, event: JsonEvent, knows: impl Fn(&str) -> bool) -> Read {
        let at_key = self.depth == 1 && self.arguments_depth == 2;
        let is_arguments = !at_key || ARGUMENTS.contains(&self.key.as_str());
        match event {
            JsonEvent::StartObject | JsonEvent::StartArray => {
                self.depth += 1;
                if self.depth > DEEPEST {
                    return Read::Bad;
                }
                if at_key && self.key == "name" {
                    return Read::Bad;
                }
                if self.depth == self.arguments_depth && is_arguments {
                    if event == JsonEvent::StartArray {
                        return Read::Bad;
                    }
                    (self.has_arguments, self.is_in_arguments) = (true, true);
                    "{".clone_into(&mut self.arguments);
                }
                Read::More
            }
            JsonEvent::EndObject | JsonEvent::EndArray => {
                self.depth -= 1;
                self.is_in_arguments &= self.depth >= self.arguments_depth;
                if self.depth == 0 { self.end() } else { Read::More }
            }
            _ if self.depth == 0 => Read::Bad,
            _ if !at_key => Read::More,
            JsonEvent::FieldName => match self.parser.current_str() {
                Ok(key) => {
                    key.clone_into(&mut self.key);
                    if self.is_repeated() { Read::Bad } else { Read::More }
                }
                Err(_) => Read::Bad,
            },
            _ if self.key != "name" && !is_arguments => Read::More,
            JsonEvent::ValueNull if is_arguments => self.set_arguments("{}".to_owned()),
            JsonEvent::ValueString => match self.parser.current_str().map(str::to_owned) {
                Ok(text) if is_arguments && is_object(&text) => self.set_arguments(text),
                Ok(name) if !is_arguments && knows(&name) => {
                    self.name = Some(name);
                    Read::More
                }
                _ => Read::Bad,
            },
            _ => Read::Bad,
        }
    }

    /// Whether the key says again what the call has already. The first arguments may have been sent, so
    /// others cannot replace them.
    fn is_repeated(&self) -> bool {
        let is_arguments = ARGUMENTS.contains(&self.key.as_str());
        self.key == "name" && self.name.is_some() || is_arguments && self.has_arguments
    }

    /// Some models write the arguments as a text, or null for a function without any.
    fn set_arguments(&mut self, json: String) -> Read {
        (self.arguments, self.has_arguments) = (json, true);
        Read::More
    }

    /// The end of the call.
    fn end(&mut self) -> Read {
        if !self.has_arguments && self.may_lack_arguments {
            self.set_arguments("{}".to_owned());
        }
        if self.name.is_some() && self.has_arguments { Read::Done } else { Read::Bad }
    }
}

fn is_object(json: &str) -> bool {
    matches!(serde_json::from_str(json), Ok(Value::Object(_)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde::de::IgnoredAny;

    use super::*;

    /// The length in bytes of the object at the beginning of `text`; `None` if there is none.
    fn object_length(text: &str) -> Option<usize> {
        let mut reader = CallReader::named("f".to_owned());
        for (at, c) in text.char_indices() {
            match reader.push(c, |_| false) {
                Read::More => {}
                Read::Done => return Some(at + c.len_utf8()),
                Read::Bad => return None,
            }
        }
        None
    }

    #[test]
    fn arguments_end_where_they_end() {
        let cases = [
            (r#"{"a": [1, -0.5e+3, "x\"\u00e9}", {}, []]} rest"#, Some(41)),
            ("{} x", Some(2)),
            ("{\"a\":true},", Some(10)),
            ("{\"a\":-12.5}, 3", Some(11)),
            ("{\"a\":0}]", Some(7)),
            ("{\"a\" 1}", None),
            ("{a: 1}", None),
            ("{'a': 1}", None),
            ("{\"a\":[1,]}", None),
            ("{\"a\": 1,}", None),
            ("{\"a\":[1}", None),
            ("{\"a\":01}", None),
            ("{\"a\":\"a\nb\"}", None),
            ("{\"a\":\"\\x\"}", None),
            ("{\"a\":1.}", None),
            ("{\"a\":nul }", None),
            ("[]", None),
            ("1 ", None),
        ];
        for (text, length) in cases {
            assert_eq!(object_length(text), length, "{text}");
        }
        let nested = |depth| format!("{{\"a\":{}{}}}", "[".repeat(depth), "]".repeat(depth));
        assert_eq!(object_length(&nested(200)), None);
        assert_eq!(object_length(&nested(126)), Some(258));
    }

    proptest! {
        #[test]
        fn accepts_exactly_what_serde_json_accepts(
            text in r#"\{(?:[{}\[\]",:a0-2.eE+ tru\\u]|true|null|"k": ?){0,14}\}"#,
        ) {
            let is_whole = object_length(&text) == Some(text.len());
            prop_assert_eq!(is_whole, serde_json::from_str::<IgnoredAny>(&text).is_ok());
        }
    }
}
