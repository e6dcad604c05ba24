//! Well-formed HTTP with a malformed body.

use rand::Rng as _;
use rand::seq::{IndexedMutRandom as _, IndexedRandom as _};
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

/// A request whose body cannot be read, or has fields of a wrong type or value.
pub fn malformed(valid: &Valid, random: &mut ChaCha8Rng) -> Attempt {
    let (path, request) = any_request(valid, random);
    let text = request.to_string();
    let (body, must_fail) = match random.random_range(0..10) {
        0 => (text.as_bytes()[..random.random_range(0..text.len() - 1)].to_vec(), true),
        1 => (invalid_utf8(text.into_bytes(), random), true),
        2 => (number(&text, random), true),
        3 => (deep(&text, random), true),
        4 => (flipped(text.into_bytes(), random), false),
        5 => (wrong_type(request, random).to_string().into_bytes(), false),
        6 => (out_of_range(request, random).to_string().into_bytes(), false),
        7 => (huge(request, random).to_string().into_bytes(), false),
        8 => (any_bytes(random), true),
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

fn flipped(mut bytes: Vec<u8>, random: &mut ChaCha8Rng) -> Vec<u8> {
    for _ in 0..random.random_range(1..6) {
        let at = random.random_range(0..bytes.len());
        bytes[at] = random.random();
    }
    bytes
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

/// The request with one of its values replaced.
fn replaced(request: &Value, random: &mut ChaCha8Rng, new: Value) -> Value {
    let mut request = request.clone();
    let mut place = &mut request;
    loop {
        let is_leaf = match place {
            Value::Object(map) => map.is_empty(),
            Value::Array(list) => list.is_empty(),
            _ => true,
        };
        if is_leaf || random.random_range(0..4) == 0 {
            break;
        }
        place = match place {
            Value::Object(map) => {
                let at = random.random_range(0..map.len());
                map.values_mut().nth(at).unwrap()
            }
            Value::Array(list) => list.choose_mut(random).unwrap(),
            _ => unreachable!("only objects and lists have values within them"),
        };
    }
    *place = new;
    request
}

fn wrong_type(request: &Value, random: &mut ChaCha8Rng) -> Value {
    let types = [
        json!(null),
        json!(true),
        json!(-1),
        json!(1.5),
        json!(""),
        json!("text"),
        json!([]),
        json!([[]]),
        json!({}),
        json!({"type": {}}),
    ];
    let new = types.choose(random).unwrap().clone();
    replaced(request, random, new)
}

fn out_of_range(request: &Value, random: &mut ChaCha8Rng) -> Value {
    let numbers = [
        json!(-1),
        json!(i64::MIN),
        json!(u64::MAX),
        json!(1e308),
        json!(-1e308),
        json!(5e-324),
        json!(1e19),
        json!(4_294_967_296_u64),
        json!(0),
    ];
    let new = numbers.choose(random).unwrap().clone();
    replaced(request, random, new)
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
    replaced(request, random, new)
}
