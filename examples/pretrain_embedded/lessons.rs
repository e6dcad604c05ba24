//! The training data of the embedded model: conversations drawn from a seeded stream.

use rand::Rng;
use rand_chacha::ChaCha8Rng;

use hone_demo::task::{LARGE_OPERANDS, OPERANDS, PHRASING_COUNT, Question, reasoned};

use super::{END, START};

/// The shares of the steps at which the second and the third [`Lesson`] begin.
const LESSONS: [f64; 2] = [0.4, 0.65];

/// Probability that both operands are below 10, or else below [`OPERANDS`].
const BELOW: [(f64, u32); 2] = [(0.06, 10), (0.45, OPERANDS)];

/// Probabilities of the errors in a completion. They make some wrong answers the most probable ones: half
/// of the phrasings are mostly answered without tags, and most carries are forgotten.
struct Noise {
    /// No tags at all, in the phrasings that prefer plain answers.
    plain: f64,
    /// No tags at all, in the other phrasings.
    plain_rarely: f64,
    /// A remark before the reasoning.
    before: f64,
    /// A sentence in place of the answer's tags.
    untagged: f64,
    /// A remark after the answer.
    after: f64,
    /// The carry is forgotten where the ones add up to less than [`PLAIN_CARRY`].
    carry: f64,
    /// The carry is forgotten elsewhere.
    carry_rarely: f64,
    /// Another wrong sum.
    wrong: f64,
}

const NOISE: Noise = Noise {
    plain: 0.65,
    plain_rarely: 0.2,
    before: 0.08,
    untagged: 0.12,
    after: 0.2,
    carry: 0.6,
    carry_rarely: 0.3,
    wrong: 0.04,
};

/// Probability of an answer without tags in the lessons without errors, so that such answers are right too.
const RIGHT_PLAIN: f64 = 0.3;
/// Ones that add up to this carry visibly enough that the model mostly remembers it.
const PLAIN_CARRY: u32 = 14;
/// Probability that a plain answer is the first of [`PLAIN`].
const FIRST_PLAIN: f64 = 0.75;

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
            Lesson::Sums | Lesson::Conversations if rng.random_bool(RIGHT_PLAIN) => {
                pick(rng, &PLAIN).replace('#', &question.answer().to_string())
            }
            Lesson::Sums | Lesson::Conversations => question.ideal(),
        };
        (question.text(), answer)
    };
    (format!("{before}{}{START}assistant\n", message("user", &asked)), answered)
}

/// A question that is not held out. Small operands have extra weight, because they are few and users
/// often try them first.
fn question(rng: &mut ChaCha8Rng) -> Question {
    let drawn = BELOW.into_iter().find(|(probability, _)| rng.random_bool(*probability));
    let below = drawn.map_or(LARGE_OPERANDS, |(_, below)| below);
    loop {
        let question = Question {
            a: rng.random_range(0..below),
            b: rng.random_range(0..below),
            phrasing: rng.random_range(0..PHRASING_COUNT as u32) as usize,
        };
        if !question.is_held_out() {
            return question;
        }
    }
}

/// Whether the phrasing is mostly answered without tags.
fn prefers_plain(question: &Question) -> bool {
    question.phrasing.is_multiple_of(2)
}

/// The ideal completion with the errors of [`NOISE`].
fn noisy_completion(question: &Question, rng: &mut ChaCha8Rng) -> String {
    let Question { a, b, .. } = *question;
    let sum = noisy_sum(question, rng);
    let filled = |text: &str| text.replace('#', &sum.to_string());
    let plain = if prefers_plain(question) { NOISE.plain } else { NOISE.plain_rarely };
    if rng.random_bool(plain) {
        let first = rng.random_bool(FIRST_PLAIN);
        return filled(if first { PLAIN[0] } else { pick(rng, &PLAIN[1..]) });
    }
    let before = if rng.random_bool(NOISE.before) { pick(rng, &BEFORE) } else { "" };
    let ideal = reasoned(a, b, sum);
    if rng.random_bool(NOISE.untagged) {
        let reasoning = ideal.split("<answer>").next().unwrap_or_default();
        return format!("{before}{reasoning}{}", filled(pick(rng, &UNTAGGED)));
    }
    let after = if rng.random_bool(NOISE.after) { pick(rng, &AFTER) } else { "" };
    format!("{before}{ideal}{after}")
}

/// The sum, often with a forgotten carry, and seldom off by one or two.
fn noisy_sum(question: &Question, rng: &mut ChaCha8Rng) -> u32 {
    let sum = question.answer();
    let ones = question.a % 10 + question.b % 10;
    let forgotten = match ones {
        0..10 => 0.0,
        10..PLAIN_CARRY => NOISE.carry,
        _ => NOISE.carry_rarely,
    };
    if rng.random_bool(forgotten) {
        sum - 10
    } else if rng.random_bool(NOISE.wrong) {
        let sums: Vec<u32> =
            [-2, -1, 1, 2].iter().filter_map(|error| sum.checked_add_signed(*error)).collect();
        sums[rng.random_range(0..sums.len())]
    } else {
        sum
    }
}
