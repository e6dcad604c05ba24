//! Valid inputs with random changes.

use std::collections::BTreeSet;
use std::fmt;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use serde_json::{Value, json};

/// Numbers at limits of types and of fields.
const NUMBERS: [f64; 16] = [
    -1.0, -0.0, 0.0, 0.1, 1.0, 1.5, 2.0, 8.0, 9.0, 20.0, 21.0, 128.0, 257.0, 65_536.0, 1e19, 1e308,
];
const WHOLE: [i64; 8] = [-1, 0, 1, 8, 256, u32::MAX as i64, i64::MIN, i64::MAX];
/// Texts that tokenizers, templates and parsers may mistake for something else.
const TEXTS: [&str; 18] = [
    "",
    " ",
    "\0",
    "\n\n",
    "{",
    "\"",
    "é\u{301}",
    "\u{202e}",
    "👩‍👩‍👧",
    "\u{fffd}",
    "\u{feff}",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</think>",
    "{{ messages }}",
    "data: [DONE]\n\n",
    "chatcmpl-0190a2b3c4d57e6f8091a2b3c4d5e6f7",
];
/// Bytes that make a JSON text malformed, or nearly.
const BYTES: [&[u8]; 16] = [
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"-",
    b"00",
    b"0.",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\\ud800",
    b"\\u0000",
    b"\0",
    b"[[[[",
    b"{\"a\":",
    b",",
    b"\"",
    b"\xef\xbb\xbf",
];

/// Values within a JSON value that may still be multiplied.
const MOST_VALUES: usize = 200;

/// The body of a request.
#[derive(Clone)]
pub struct Body(pub Vec<u8>);

impl fmt::Debug for Body {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&String::from_utf8_lossy(&self.0))
    }
}

/// A change of one value within a JSON value.
#[derive(Clone, Debug)]
enum Edit {
    Replace(Value),
    /// Adds a member to an object, or an element to a list.
    Insert(String, Value),
    Remove,
    /// Replaces it by another value of the same document.
    Copy(Index),
    /// Puts it into objects or lists.
    Nest(usize, bool),
    /// Repeats a text or the elements of a list.
    Repeat(usize),
}

/// A change of the bytes.
#[derive(Clone, Debug)]
enum RawEdit {
    Cut,
    Flip(u8),
    Insert(&'static [u8]),
}

/// A change of a text.
#[derive(Clone, Debug)]
enum TextEdit {
    Insert(String),
    Remove(usize),
    /// Inserts a part of the text at another place.
    Copy(Index, usize),
}

/// The names of members and the short texts in JSON values.
fn words(values: &[Value]) -> Vec<String> {
    let mut found = BTreeSet::new();
    for value in values {
        for pointer in pointers(value) {
            found.extend(pointer.rsplit_once('/').map(|(_, name)| unescaped(name)));
            let text = value.pointer(&pointer).and_then(Value::as_str);
            found.extend(text.filter(|text| text.len() < 40).map(str::to_owned));
        }
    }
    found.into_iter().collect()
}

fn unescaped(name: &str) -> String {
    name.replace("~1", "/").replace("~0", "~")
}

fn pointers(value: &Value) -> Vec<String> {
    let (mut all, mut at) = (vec![String::new()], 0);
    while let Some(pointer) = all.get(at).cloned() {
        match value.pointer(&pointer) {
            Some(Value::Object(map)) => {
                all.extend(map.keys().map(|name| {
                    format!("{pointer}/{}", name.replace('~', "~0").replace('/', "~1"))
                }))
            }
            Some(Value::Array(list)) => {
                all.extend((0..list.len()).map(|i| format!("{pointer}/{i}")));
            }
            _ => {}
        }
        at += 1;
    }
    all
}

fn any_value(words: Vec<String>) -> BoxedStrategy<Value> {
    let leaf = prop_oneof![
        1 => Just(Value::Null),
        2 => any::<bool>().prop_map(Value::from),
        3 => select(NUMBERS.to_vec()).prop_map(Value::from),
        2 => select(WHOLE.to_vec()).prop_map(Value::from),
        1 => any::<f64>().prop_map(Value::from),
        1 => any::<u64>().prop_map(Value::from),
        4 => select(words.clone()).prop_map(Value::from),
        3 => select(TEXTS.to_vec()).prop_map(Value::from),
        1 => "\\PC{0,12}".prop_map(Value::from),
    ];
    let nested = leaf.prop_recursive(3, 16, 4, move |inner| {
        let member = (select(words.clone()), inner.clone());
        prop_oneof![
            vec(inner, 0..4).prop_map(Value::from),
            vec(member, 0..4).prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    });
    nested.boxed()
}

fn edits(words: Vec<String>) -> BoxedStrategy<Edit> {
    let value = any_value(words.clone());
    prop_oneof![
        6 => value.clone().prop_map(Edit::Replace),
        3 => (select(words), value).prop_map(|(name, value)| Edit::Insert(name, value)),
        2 => Just(Edit::Remove),
        2 => any::<Index>().prop_map(Edit::Copy),
        1 => (1..160_usize, any::<bool>()).prop_map(|(depth, list)| Edit::Nest(depth, list)),
        1 => (2..200_usize).prop_map(Edit::Repeat),
    ]
    .boxed()
}

/// JSON values: one of `valid`, often changed at some places.
pub fn values(valid: Vec<Value>) -> BoxedStrategy<Value> {
    let places = vec((any::<Index>(), edits(words(&valid))), 0..6);
    let changed = |(mut value, places): (Value, Vec<(Index, Edit)>)| {
        places.iter().for_each(|(place, edit)| apply(&mut value, place, edit));
        value
    };
    (select(valid), places).prop_map(changed).boxed()
}

/// The JSON texts of [`values`], sometimes with changed bytes.
pub fn bodies(valid: Vec<Value>) -> BoxedStrategy<Body> {
    let raw = prop_oneof![
        Just(RawEdit::Cut),
        any::<u8>().prop_map(RawEdit::Flip),
        select(BYTES.to_vec()).prop_map(RawEdit::Insert),
    ];
    let raw = proptest::option::weighted(0.15, vec((any::<Index>(), raw), 1..4));
    let changed = |(value, raw): (Value, Option<Vec<(Index, RawEdit)>>)| {
        let mut bytes = value.to_string().into_bytes();
        for (place, edit) in raw.into_iter().flatten() {
            let at = place.index(bytes.len() + 1);
            match edit {
                RawEdit::Cut => bytes.truncate(at),
                RawEdit::Flip(bits) => bytes.iter_mut().skip(at).take(1).for_each(|b| *b ^= bits),
                RawEdit::Insert(more) => drop(bytes.splice(at..at, more.iter().copied())),
            }
        }
        Body(bytes)
    };
    (values(valid), raw).prop_map(changed).boxed()
}

/// One of the texts `valid`, often changed at some places. `pieces` are texts that may be inserted.
pub fn texts(valid: &[&str], pieces: &[&str]) -> BoxedStrategy<String> {
    let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
    let edit = prop_oneof![
        3 => select(owned(pieces)).prop_map(TextEdit::Insert),
        1 => "\\PC{1,4}".prop_map(TextEdit::Insert),
        2 => (1..12_usize).prop_map(TextEdit::Remove),
        1 => (any::<Index>(), 1..40_usize).prop_map(|(from, len)| TextEdit::Copy(from, len)),
    ];
    let changed = |(text, edits): (String, Vec<(Index, TextEdit)>)| {
        let mut text: Vec<char> = text.chars().collect();
        for (place, edit) in edits {
            let at = place.index(text.len() + 1);
            let (end, more) = match edit {
                TextEdit::Insert(more) => (at, more.chars().collect()),
                TextEdit::Remove(len) => (text.len().min(at + len), Vec::new()),
                TextEdit::Copy(from, len) => {
                    let from = from.index(text.len() + 1);
                    (at, text[from..text.len().min(from + len)].to_vec())
                }
            };
            drop(text.splice(at..end, more));
        }
        text.into_iter().collect()
    };
    (select(owned(valid)), vec((any::<Index>(), edit), 0..8)).prop_map(changed).boxed()
}

fn apply(value: &mut Value, place: &Index, edit: &Edit) {
    let all = pointers(value);
    let pointer = &all[place.index(all.len())];
    let is_small = all.len() < MOST_VALUES;
    match edit {
        Edit::Remove => {
            let Some((parent, name)) = pointer.rsplit_once('/') else { return };
            match value.pointer_mut(parent) {
                Some(Value::Object(map)) => drop(map.remove(&unescaped(name))),
                Some(Value::Array(list)) => drop(list.remove(name.parse().unwrap())),
                _ => {}
            }
        }
        Edit::Copy(from) if is_small => {
            let copy = value.pointer(&all[from.index(all.len())]).cloned();
            *value.pointer_mut(pointer).unwrap() = copy.unwrap();
        }
        Edit::Replace(new) => *value.pointer_mut(pointer).unwrap() = new.clone(),
        Edit::Insert(name, new) => match value.pointer_mut(pointer) {
            Some(Value::Object(map)) => drop(map.insert(name.clone(), new.clone())),
            Some(Value::Array(list)) => list.push(new.clone()),
            _ => {}
        },
        Edit::Nest(depth, list) => {
            let place = value.pointer_mut(pointer).unwrap();
            let mut nested = place.take();
            for _ in 0..*depth {
                nested = if *list { json!([nested]) } else { json!({"a": nested}) };
            }
            *place = nested;
        }
        Edit::Repeat(times) if is_small => match value.pointer_mut(pointer) {
            Some(Value::Array(list)) if list.len() < 50 => {
                let length = list.len() * times;
                *list = list.iter().cycle().take(length).cloned().collect();
            }
            Some(Value::String(text)) if text.len() < 500 => *text = text.repeat(*times),
            _ => {}
        },
        Edit::Copy(_) | Edit::Repeat(_) => {}
    }
}
