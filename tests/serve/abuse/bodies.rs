//! Well-formed HTTP with a malformed body. `tests/http/fuzz` changes the fields of bodies.

use rand::Rng as _;
use rand::seq::{IndexedRandom as _, IteratorRandom as _};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use super::Valid;
use super::attempt::{Attempt, Pace, any_request, post};

/// Texts that are no JSON numbers, or too large ones.
const NUMBERS: [&str; 13] = [
    "NaN",
    "Infinity",
    "-Infinity",
    "nan",
    "1e999",
    "-1e999",
    "0x10",
    "+1",
    ".5",
    "1.",
    "01",
    "--1",
    "1e",
];

/// A request whose body cannot be read, or is huge.
pub fn malformed(valid: &Valid, random: &mut ChaCha8Rng) -> Attempt {
    let (path, request) = any_request(valid, random);
    let text = request.to_string();
    let (body, must_fail) = match random.random_range(0..7) {
        0 => (text.as_bytes()[..random.random_range(0..text.len() - 1)].to_vec(), true),
        1 => (invalid_utf8(text.into_bytes(), random), true),
        2 => (number(&text, random), true),
        3 => (deep(&text, random), true),
        4 => (huge(request, random).to_string().into_bytes(), false),
        5 => (any_bytes(random), true),
        _ => {
            (format!("{text}{}", ["}", "{}", "\0", ",", "x"].choose(random).unwrap()).into(), true)
        }
    };
    Attempt { bytes: post(path, &body), pace: Pace::Normal, must_fail }
}

fn any_bytes(random: &mut ChaCha8Rng) -> Vec<u8> {
    let length = random.random_range(0..2000);
    // No digit, letter or bracket begins a JSON value by chance.
    (0..length).map(|_| random.random_range(0x80..=0xff_u8)).collect()
}

/// Bytes within a string that are not UTF-8.
fn invalid_utf8(mut bytes: Vec<u8>, random: &mut ChaCha8Rng) -> Vec<u8> {
    let wrong: [&[u8]; 6] =
        [b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xe2\x82", b"\x80"];
    let at = bytes.iter().position(|byte| *byte == b'"').unwrap() + 1;
    drop(bytes.splice(at..at, wrong.choose(random).unwrap().iter().copied()));
    bytes
}

/// A value that is no JSON number.
fn number(text: &str, random: &mut ChaCha8Rng) -> Vec<u8> {
    let number = NUMBERS.choose(random).unwrap();
    // After the first member's name, or as a further element.
    match text.split_once(':') {
        Some((name, rest)) => format!("{name}:{number},\"a\":{rest}").into(),
        None => number.as_bytes().to_vec(),
    }
}

/// Values within each other beyond the limit of the reader.
fn deep(text: &str, random: &mut ChaCha8Rng) -> Vec<u8> {
    let depth = random.random_range(200..20_000);
    let (open, close) = if random.random() { ("[", "]") } else { ("{\"a\":", "}") };
    let nested = match random.random_range(0..3) {
        0 => open.repeat(depth),
        _ => format!("{}1{}", open.repeat(depth), close.repeat(depth)),
    };
    match text.split_once(':') {
        Some((name, rest)) => format!("{name}:{nested},\"a\":{rest}").into(),
        None => nested.into(),
    }
}

/// Large enough to be refused or to take long, and so small that what several requests need at once is little.
fn huge(request: &Value, random: &mut ChaCha8Rng) -> Value {
    let new = match random.random_range(0..4) {
        0 => json!("é".repeat(random.random_range(1000..10_000))),
        1 => json!("<|im_start|>".repeat(random.random_range(100..1_000))),
        2 => json!(vec![1; random.random_range(1000..20_000)]),
        _ => {
            let names = 0..random.random_range(100..2_000);
            Value::Object(names.map(|i| (format!("field{i}"), json!(i))).collect())
        }
    };
    let mut request = request.clone();
    let values = request.as_object_mut().into_iter().flat_map(serde_json::Map::values_mut);
    if let Some(value) = values.choose(random) {
        *value = new;
    }
    request
}
