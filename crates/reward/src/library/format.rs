//! Functions that look at a completion's form.

use regex::Regex;

use super::{indicator, share_of_target};

/// The opening and closing tags, in order: `<a>`, `</a>`, `<b>`, `</b>`.
pub struct Tags(Vec<String>);

impl Tags {
    /// From the tags' names.
    pub fn new<S: AsRef<str>>(names: &[S]) -> Self {
        let both = |name: &S| [format!("<{}>", name.as_ref()), format!("</{}>", name.as_ref())];
        Self(names.iter().flat_map(both).collect())
    }

    fn each_once(&self, text: &str) -> bool {
        self.0.iter().all(|tag| stands_once(text, tag))
    }
}

fn stands_once(text: &str, tag: &str) -> bool {
    let mut places = text.match_indices(tag);
    places.next().is_some() && places.next().is_none()
}

/// `regex`: `min(1, matches / count)`, in [0, 1]: with `count` 1 whether the pattern matches
/// somewhere. Typical weight 0.5.
pub fn regex_match(text: &str, pattern: &Regex, count: u32) -> f64 {
    let most = usize::try_from(count.max(1)).unwrap_or(usize::MAX);
    share_of_target(pattern.find_iter(text).take(most).count(), count)
}

/// `format_strict`: 1 when the completion matches
/// `^\s*<a>(.*?)</a>\s*<b>(.*?)</b>\s*$` (`.` matching line breaks too, and so on for each tag)
/// and each tag stands exactly once, else 0; typical weight 0.5 to 1.
pub fn format_strict(text: &str, tags: &Tags) -> f64 {
    indicator(tags.each_once(text) && in_strict_order(text, tags).is_some())
}

/// What the last tag encloses, when each pair follows the one before after white space alone.
///
/// With every tag standing once, the prefixes and splits can only fit in order.
fn in_strict_order<'t>(text: &'t str, tags: &Tags) -> Option<&'t str> {
    let (mut rest, mut inside) = (text.trim(), "");
    for pair in tags.0.chunks(2) {
        let [open, close] = pair else { return None };
        (inside, rest) =
            rest.trim_start().strip_prefix(open.as_str())?.split_once(close.as_str())?;
    }
    rest.is_empty().then_some(inside)
}

/// `format_soft`: 1 when `<a>`, `</a>`, `<b>`, `</b>` and so on occur in this order, whatever
/// stands around and between them, else 0; typical weight 0.5.
pub fn format_soft(text: &str, tags: &Tags) -> f64 {
    let mut rest = text;
    let in_order = tags.0.iter().all(|tag| match rest.split_once(tag.as_str()) {
        Some((_, after)) => {
            rest = after;
            true
        }
        None => false,
    });
    indicator(in_order)
}

/// `format_incremental`: `max(0, k / n - trailing_penalty c)`, `k` of the `n` opening and closing
/// tags standing exactly once and `c` characters following the last closing one; from 0 to 1,
/// typical weight 0.5 to 1.
///
/// A completion without the last tag has nothing after it and keeps its partial credit.
pub fn format_incremental(text: &str, tags: &Tags, trailing_penalty: f64) -> f64 {
    let once = tags.0.iter().filter(|tag| stands_once(text, tag)).count();
    let after = tags.0.last().and_then(|last| text.rsplit_once(last.as_str()));
    let trailing = after.map_or(0, |(_, after)| after.chars().count());
    (once as f64 / tags.0.len().max(1) as f64 - trailing_penalty * trailing as f64).max(0.0)
}

/// `think_format`: 1 when the completion begins with `<think>`, has no second one, and has
/// `</think>` behind it, else 0 (TRL's `think_format_reward`: nothing need follow). Typical weight
/// 0.5 to 1.
pub fn think_format(text: &str) -> f64 {
    let after = text.strip_prefix("<think>");
    indicator(after.is_some_and(|t| !t.contains("<think>") && t.contains("</think>")))
}

/// `think_answer`: 1 for `<think>…</think><answer>…</answer>` as [`format_strict`] and an answer
/// that is not blank, else 0; typical weight 0.5 to 1.
pub fn think_answer(text: &str, tags: &Tags) -> f64 {
    let inside = if tags.each_once(text) { in_strict_order(text, tags) } else { None };
    indicator(inside.is_some_and(|answer| !answer.trim().is_empty()))
}
