//! The training data of the embedded model: conversations drawn from a seeded stream.

use rand::Rng;
use rand_chacha::ChaCha8Rng;

use hone::demo::task::{OPERANDS, PHRASING_COUNT, Question, reasoned};

use super::{END, START};

/// The shares of the steps at which the second and the third [`Lesson`] begin.
const LESSONS: [f64; 2] = [0.4, 0.65];

/// Probability that an operand is below [`SMALL_BELOW`].
const SMALL: f64 = 0.25;
/// Bound of the small operands.
const SMALL_BELOW: u32 = 10;

/// Probabilities of the errors in a completion.
struct Noise {
    /// The sum is wrong.
    wrong: f64,
    /// No tags at all.
    plain: f64,
    /// A remark before the reasoning.
    before: f64,
    /// A sentence in place of the answer's tags.
    untagged: f64,
    /// A remark after the answer.
    after: f64,
}

const NOISE: Noise = Noise { wrong: 0.22, plain: 0.14, before: 0.10, untagged: 0.16, after: 0.20 };

const PLAIN: [&str; 3] = ["The sum is #.", "I think it is #.", "#, I guess."];
const BEFORE: [&str; 2] = ["Sure! ", "Well, "];
const UNTAGGED: [&str; 2] = ["So it is #.", "Result: #."];
const AFTER: [&str; 2] = [" Hope that helps!", " Is that right?"];
const SYSTEM: [&str; 3] = ["You are a helpful assistant.", "You add small numbers.", "Be brief."];

/// Probability of small talk in place of a question.
const TALK: f64 = 0.03;
/// Messages of small talk.
const SMALL_TALK: [&str; 4] = ["Hello!", "Hi", "Who are you?", "What can you do?"];
/// The answer to small talk.
const INTRODUCTION: &str = "I add small numbers: try 12 + 7.";

/// Every sentence of the task, once each.
pub fn corpus() -> Vec<String> {
    let questions = (0..PHRASING_COUNT).map(|phrasing| Question { a: 1, b: 2, phrasing }.text());
    let sentences = [&PLAIN[..], &BEFORE, &UNTAGGED, &AFTER, &SYSTEM, &SMALL_TALK].concat();
    questions
        .chain(sentences.into_iter().map(str::to_owned))
        .chain(["system", "user", "assistant", INTRODUCTION, "1 + 2 = 3"].map(str::to_owned))
        .collect()
}

fn pick<'a>(rng: &mut ChaCha8Rng, texts: &[&'a str]) -> &'a str {
    texts[rng.random_range(0..texts.len())]
}

/// A message as the chat template writes it.
fn message(role: &str, content: &str) -> String {
    format!("{START}{role}\n{content}{END}\n")
}

/// The stages of training, in order.
#[derive(Clone, Copy, PartialEq)]
pub enum Lesson {
    /// Questions with right answers.
    Sums,
    /// Conversations with right answers.
    Conversations,
    /// Conversations with the errors of [`NOISE`].
    Noisy,
}

impl Lesson {
    /// The lesson after the share `done` of the steps.
    pub fn at(done: f64) -> Self {
        match done {
            done if done < LESSONS[0] => Self::Sums,
            done if done < LESSONS[1] => Self::Conversations,
            _ => Self::Noisy,
        }
    }
}

/// The messages before the last question.
#[derive(Clone, Copy)]
pub enum Opening {
    /// Nothing.
    Nothing,
    /// A system message.
    System,
    /// A question and its answer.
    Exchange,
}

/// A conversation up to the assistant's turn, and the assistant's completion.
pub fn conversation(lesson: Lesson, opening: Opening, rng: &mut ChaCha8Rng) -> (String, String) {
    let before = match opening {
        Opening::Nothing => String::new(),
        Opening::System => message("system", pick(rng, &SYSTEM)),
        Opening::Exchange => {
            let earlier = question(rng);
            [message("user", &earlier.text()), message("assistant", &earlier.ideal())].concat()
        }
    };
    let (asked, answered) = if lesson != Lesson::Sums && rng.random_bool(TALK) {
        (pick(rng, &SMALL_TALK).to_owned(), INTRODUCTION.to_owned())
    } else {
        let question = question(rng);
        let answer = match lesson {
            Lesson::Noisy => noisy_completion(&question, rng),
            Lesson::Sums | Lesson::Conversations => question.ideal(),
        };
        (question.text(), answer)
    };
    (format!("{before}{}{START}assistant\n", message("user", &asked)), answered)
}

fn question(rng: &mut ChaCha8Rng) -> Question {
    Question {
        a: operand(rng),
        b: operand(rng),
        phrasing: rng.random_range(0..PHRASING_COUNT as u32) as usize,
    }
}

/// The ideal completion with the errors of [`NOISE`].
fn noisy_completion(question: &Question, rng: &mut ChaCha8Rng) -> String {
    let Question { a, b, .. } = *question;
    let sum = if rng.random_bool(NOISE.wrong) { wrong_sum(a + b, rng) } else { a + b };
    let filled = |text: &str| text.replace('#', &sum.to_string());
    let opening: f64 = rng.random();
    if opening < NOISE.plain {
        return filled(pick(rng, &PLAIN));
    }
    let before = if opening < NOISE.plain + NOISE.before { pick(rng, &BEFORE) } else { "" };
    let ideal = reasoned(a, b, sum);
    if rng.random_bool(NOISE.untagged) {
        let reasoning = ideal.split("<answer>").next().unwrap_or_default();
        return format!("{before}{reasoning}{}", filled(pick(rng, &UNTAGGED)));
    }
    let after = if rng.random_bool(NOISE.after) { pick(rng, &AFTER) } else { "" };
    format!("{before}{ideal}{after}")
}

/// A wrong sum: off by one or two, or by a forgotten carry.
fn wrong_sum(sum: u32, rng: &mut ChaCha8Rng) -> u32 {
    let sums: Vec<u32> = [-10, -2, -1, 1, 2, 10]
        .iter()
        .filter_map(|error| sum.checked_add_signed(*error))
        .filter(|wrong| *wrong < 100)
        .collect();
    sums[rng.random_range(0..sums.len())]
}

/// Small operands have extra weight, because they are few and users often try them first.
fn operand(rng: &mut ChaCha8Rng) -> u32 {
    let below = if rng.random_bool(SMALL) { SMALL_BELOW } else { OPERANDS };
    rng.random_range(0..below)
}
