//! Random completions of the pieces that reward functions search for, for tests and benchmarks.

use rand::Rng;
use rand_chacha::ChaCha8Rng;

/// The pieces that reward functions search for.
#[rustfmt::skip]
pub const PIECES: [&str; 72] = [
    "<reasoning>", "</reasoning>", "<answer>", "</answer>", "<think>", "</think>", "<", ">",
    "/answer>", "\\boxed{", "\\boxed", "\\frac{", "\\frac", "\\dfrac12", "\\sqrt[3]{", "\\sqrt",
    "\\cdot ", "\\times ", "\\pi", "\\left(", "\\right)", "\\text{", "\\", "{", "}", "{,}", "$",
    "%", "^", "_", "(", ")", "[", "]", "1", "0", "12", ",234", ".5", "e9", "-", "+", "*", "/", "=",
    "x", "π", "√", "½", "²", "−", "answer is ", "Answer: ", "B", "(C)", "D. ", "Step 1: ",
    "First, ", "\n- ", "\n1. ", "[1]", "(Smith, 2020)", "https://a.example/", "```json\n", "```",
    "{\"answer\": 1}", "sorry ", "the ", " ", "\n", "é", "\u{3000}",
];

/// A text of at most `most` pieces, mixed with random characters.
pub fn random_text(rng: &mut ChaCha8Rng, most: usize) -> String {
    let of_unicode = rng.random_bool(0.1);
    let mut text = String::new();
    for _ in 0..rng.random_range(0..=most) {
        if of_unicode || rng.random_bool(0.05) {
            text.push(char::from_u32(rng.random_range(0..0x11_0000)).unwrap_or('\u{fffd}'));
        } else {
            text.push_str(PIECES[rng.random_range(0..PIECES.len())]);
        }
    }
    text
}
