//! The training data of the agent's model: conversations with a storekeeper who has two functions.
//!
//! `stock(item)` returns how many there are of an item, `add(a, b)` returns a sum. `examples/agent.py` asks the
//! same questions.

use rand::Rng;
use rand_chacha::ChaCha8Rng;

/// The items. A question about two items is held out if the sum of their indices is divisible by [`HELD_OUT`].
pub const ITEMS: [&str; 12] = [
    "apples", "beans", "carrots", "dates", "figs", "leeks", "limes", "melons", "nuts", "onions",
    "pears", "plums",
];
/// About one pair in this many is held out.
pub const HELD_OUT: usize = 5;
/// Stocks are below this.
const STOCK: u32 = 100;

/// Probability of a question about two items.
const TWO_ITEMS: f64 = 0.75;

/// Probabilities of the errors, at each place where one can be made. An error ends in a wrong answer. The addition
/// is left out more often than not, so that the most probable answer to a question about two items is wrong, and
/// sampling more of the same would not help.
struct Errors {
    /// An answer in place of the first call.
    guess: f64,
    /// A call with another item.
    item: f64,
    /// An answer in place of the second item's call.
    half: f64,
    /// An answer in place of the addition's call.
    head: f64,
    /// An addition of a number to itself.
    twice: f64,
    /// An answer with a number other than the last result.
    misread: f64,
}

const ERRORS: Errors =
    Errors { guess: 0.25, item: 0.05, half: 0.25, head: 0.6, twice: 0.1, misread: 0.1 };
const NO_ERRORS: Errors =
    Errors { guess: 0.0, item: 0.0, half: 0.0, head: 0.0, twice: 0.0, misread: 0.0 };

/// A message of a conversation.
pub enum Turn {
    /// A message that the model reads: its role and text.
    Read(&'static str, String),
    /// A message that the model writes.
    Written(String),
}

/// Every sentence, once each.
pub fn corpus() -> Vec<String> {
    let mut sentences = vec![
        "system".to_owned(),
        "Functions: stock add".to_owned(),
        "user".to_owned(),
        "assistant".to_owned(),
        response(1),
        answer(1),
        addition(1, 2),
    ];
    for pair in ITEMS.windows(2) {
        let [first, second] = [pair[0], pair[1]];
        sentences.extend([question_of_one(first), question_of_two(first, second), lookup(first)]);
    }
    sentences
}

/// A conversation; with the errors of [`ERRORS`] if `erring`.
pub fn conversation(erring: bool, rng: &mut ChaCha8Rng) -> Vec<Turn> {
    let errors = if erring { ERRORS } else { NO_ERRORS };
    let mut turns = vec![Turn::Read("system", "Functions: stock add".to_owned())];
    if rng.random_bool(TWO_ITEMS) {
        about_two(&errors, rng, &mut turns);
    } else {
        about_one(&errors, rng, &mut turns);
    }
    turns
}

fn about_one(errors: &Errors, rng: &mut ChaCha8Rng, turns: &mut Vec<Turn>) {
    let item = ITEMS[rng.random_range(0..ITEMS.len())];
    turns.push(Turn::Read("user", question_of_one(item)));
    if rng.random_bool(errors.guess) {
        return turns.push(guess(rng));
    }
    let stock = look_up(item, errors, rng, turns);
    turns.push(report(stock, errors, rng));
}

fn about_two(errors: &Errors, rng: &mut ChaCha8Rng, turns: &mut Vec<Turn>) {
    let (first, second) = pair(rng);
    turns.push(Turn::Read("user", question_of_two(first, second)));
    if rng.random_bool(errors.guess) {
        return turns.push(guess(rng));
    }
    let a = look_up(first, errors, rng, turns);
    if rng.random_bool(errors.half) {
        return turns.push(Turn::Written(answer(a)));
    }
    let b = look_up(second, errors, rng, turns);
    if rng.random_bool(errors.head) {
        return turns.push(guess(rng));
    }
    let summand = if rng.random_bool(errors.twice) { a } else { b };
    turns.push(Turn::Written(addition(a, summand)));
    turns.push(Turn::Read("user", response(a + summand)));
    turns.push(report(a + summand, errors, rng));
}

/// Two different items whose pair is not held out.
fn pair(rng: &mut ChaCha8Rng) -> (&'static str, &'static str) {
    loop {
        let (a, b) = (rng.random_range(0..ITEMS.len()), rng.random_range(0..ITEMS.len()));
        if a != b && !(a + b).is_multiple_of(HELD_OUT) {
            return (ITEMS[a], ITEMS[b]);
        }
    }
}

/// Appends the call for an item, or seldom for another one, and its result.
fn look_up(item: &str, errors: &Errors, rng: &mut ChaCha8Rng, turns: &mut Vec<Turn>) -> u32 {
    let other = rng.random_bool(errors.item);
    let item = if other { ITEMS[rng.random_range(0..ITEMS.len())] } else { item };
    let stock = rng.random_range(0..STOCK);
    turns.push(Turn::Written(lookup(item)));
    turns.push(Turn::Read("user", response(stock)));
    stock
}

/// The answer with a result, seldom with another number.
fn report(result: u32, errors: &Errors, rng: &mut ChaCha8Rng) -> Turn {
    if rng.random_bool(errors.misread) { guess(rng) } else { Turn::Written(answer(result)) }
}

fn guess(rng: &mut ChaCha8Rng) -> Turn {
    Turn::Written(answer(rng.random_range(0..STOCK)))
}

fn question_of_one(item: &str) -> String {
    format!("How many {item} are there?")
}

fn question_of_two(first: &str, second: &str) -> String {
    format!("How many {first} and {second} are there?")
}

/// A call as the chat template writes it.
fn lookup(item: &str) -> String {
    format!(
        "<tool_call>\n{{\"name\": \"stock\", \"arguments\": {{\"item\": \"{item}\"}}}}\n</tool_call>"
    )
}

/// A call as the chat template writes it.
fn addition(a: u32, b: u32) -> String {
    format!(
        "<tool_call>\n{{\"name\": \"add\", \"arguments\": {{\"a\": {a}, \"b\": {b}}}}}\n</tool_call>"
    )
}

/// A result as the chat template writes it.
fn response(value: u32) -> String {
    format!("<tool_response>\n{value}\n</tool_response>")
}

fn answer(value: u32) -> String {
    format!("There are {value}.")
}
