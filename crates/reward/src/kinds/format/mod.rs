//! Kinds that check a completion's form.

pub mod json_schema;

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use hone_core::config::between;
use hone_core::text::trim;

use crate::kinds::answer::compile;
use crate::kinds::prelude::*;
use crate::math::is_integer;
use crate::text::fenced_blocks;

define_kind! {
    pub struct ThinkAnswer {}
    kind: "think_answer",
    range: "0 or 1",
    typical_weight: "0.5 to 1.0",
    formula: "1 if the completion is <think>...</think><answer>...</answer>, each tag exactly once \
              and the answer not blank, else 0",
}

impl Kind for ThinkAnswer {
    fn build(&self, _: &BuildContext<'_>) -> Built {
        let tags = Tags::new(&["think", "answer"]);
        per_sample(move |input| {
            let answer = tags.strict_content(&input.text);
            Some(indicator(answer.is_some_and(|answer| !answer.trim().is_empty())))
        })
    }
}

define_kind! {
    pub struct ThinkFormat {}
    kind: "think_format",
    range: "0 or 1",
    typical_weight: "0.5 to 1.0",
    formula: "1 if the completion begins with <think>, has no second one, and has </think> after \
              it, else 0 (as TRL's think_format_reward)",
}

impl Kind for ThinkFormat {
    fn build(&self, _: &BuildContext<'_>) -> Built {
        per_sample(|input| {
            let after = input.text.strip_prefix("<think>");
            let is_closed = |t: &str| !t.contains("<think>") && t.contains("</think>");
            Some(indicator(after.is_some_and(is_closed)))
        })
    }
}

define_kind! {
    pub struct FormatStrict {
        /// Names of the tags, without angle brackets.
        pub tags: Vec<String> = reasoning_and_answer() => tags(),
    }
    kind: "format_strict",
    range: "0 or 1",
    typical_weight: "0.5 to 1.0",
    formula: "1 if the completion is <reasoning>...</reasoning><answer>...</answer> and nothing \
              else but white space, each tag exactly once, else 0",
}

impl Kind for FormatStrict {
    fn build(&self, _: &BuildContext<'_>) -> Built {
        let tags = Tags::new(&self.tags);
        per_sample(move |input| Some(indicator(tags.strict_content(&input.text).is_some())))
    }
}

define_kind! {
    pub struct IntegerAnswer {
        /// Regex whose first group is the answer; empty takes the whole completion.
        pub extract: String = answer_pattern(),
    }
    kind: "integer_answer",
    range: "0 or 1",
    typical_weight: "0.5",
    formula: "1 if the extracted answer is a whole number, sign and thousands separators allowed, \
              else 0",
}

impl Kind for IntegerAnswer {
    fn build(&self, _: &BuildContext<'_>) -> Built {
        let finder = AnswerFinder::new(&self.extract)?;
        per_sample(move |input| Some(indicator(finder.find(&input.text).is_some_and(is_integer))))
    }
}

/// A pattern of white space as [`hone_core::text::is_space`] defines it.
pub const PYTHON_SPACES: &str = r"[\s\x1c-\x1f]*";

/// The default of the parameter `tags`.
pub fn reasoning_and_answer() -> Vec<String> {
    ["reasoning", "answer"].map(str::to_owned).to_vec()
}

/// The opening and closing tags, in order: `<a>`, `</a>`, `<b>`, `</b>`.
pub struct Tags(Vec<String>);

impl Tags {
    /// The tags of these names.
    pub fn new(names: &[impl AsRef<str>]) -> Self {
        let both = |name: &_| {
            [format!("<{}>", AsRef::as_ref(name)), format!("</{}>", AsRef::as_ref(name))]
        };
        Self(names.iter().flat_map(both).collect())
    }

    /// The share of the tags that occur; with `once` of those that occur exactly once.
    pub fn share(&self, text: &str, once: bool) -> f64 {
        let counts =
            |tag: &&String| if once { occurs_once(text, tag) } else { text.contains(*tag) };
        self.0.iter().filter(counts).count() as f64 / self.0.len().max(1) as f64
    }

    /// The text after the last tag's last occurrence; without `repeated`, `None` also where that tag
    /// occurs more than once.
    pub fn after_last<'t>(&self, text: &'t str, repeated: bool) -> Option<&'t str> {
        let last = self.0.last()?;
        let (before, after) = text.rsplit_once(last.as_str())?;
        (repeated || !before.contains(last.as_str())).then_some(after)
    }

    /// A pattern that matches the pairs in order with nothing but white space between them; its
    /// groups are the texts within the pairs, which may contain tags.
    pub fn adjacent(&self) -> String {
        let pairs = self.0.chunks(2).map(|pair| {
            pair.iter().map(|tag| regex::escape(tag)).collect::<Vec<_>>().join("(.*?)")
        });
        format!("(?s){}", pairs.collect::<Vec<_>>().join(PYTHON_SPACES))
    }

    /// Whether the tags occur in order, with any text around and between them.
    pub fn are_in_order(&self, text: &str) -> bool {
        let mut rest = Some(text);
        for tag in &self.0 {
            rest = rest.and_then(|rest| Some(rest.split_once(tag.as_str())?.1));
        }
        rest.is_some()
    }

    /// The text within the last pair of tags, if the text matches `^\s*<a>(.*?)</a>\s*<b>(.*?)</b>\s*$`
    /// (and so on for each pair, `.` matching line breaks too) and each tag occurs exactly once.
    pub fn strict_content<'t>(&self, text: &'t str) -> Option<&'t str> {
        if !self.0.iter().all(|tag| occurs_once(text, tag)) {
            return None;
        }
        // As every tag occurs once, prefixes and splits can fit in order only.
        let (mut rest, mut inside) = (text.trim(), "");
        for pair in self.0.chunks(2) {
            let [open, close] = pair else { return None };
            (inside, rest) =
                rest.trim_start().strip_prefix(open.as_str())?.split_once(close.as_str())?;
        }
        rest.is_empty().then_some(inside)
    }
}

fn occurs_once(text: &str, tag: &str) -> bool {
    let mut places = text.match_indices(tag);
    places.next().is_some() && places.next().is_none()
}

define_kind! {
    pub struct RegexMatch {
        /// The pattern.
        pub pattern: String,
        /// Whether it must match the whole completion, white space at both ends excepted.
        pub full: bool = false,
        /// Matches that earn 1.
        pub count: u32 = 1,
    }
    kind: "regex",
    typical_weight: "0.5",
    example: "pattern = '\\d+'",
    formula: "min(1, matches / count): with count 1 whether the pattern matches anywhere; with \
              full whether it matches all of it, white space at both ends excepted",
}

impl Kind for RegexMatch {
    fn check(&self) -> Checked {
        between("count", self.count, 1, if self.full { 1 } else { 1000 })
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let mut pattern = compile("pattern", &self.pattern)?;
        if self.full {
            pattern = compile("pattern", &format!(r"\A\s*(?:{})\s*\z", self.pattern))?;
        }
        let count = self.count;
        let most = usize::try_from(count.max(1)).unwrap_or(usize::MAX);
        per_sample(move |input| {
            let found = pattern.find_iter(&input.text).take(most).count();
            Some(share_of_target(found, count))
        })
    }
}

define_kind! {
    /// The defaults are the rule of the guides to GRPO with TRL.
    pub struct FormatIncremental {
        /// Names of the tags, without angle brackets.
        pub tags: Vec<String> = reasoning_and_answer() => tags(),
        /// The deduction for each character after the last closing tag, white space at both ends of
        /// that text not counted.
        pub trailing_penalty: f64 = 0.001 => at_least(0.0),
        /// Whether text after a repeated last closing tag costs too, from its last occurrence. By
        /// default it is free, so a completion that repeats the tag evades the penalty.
        pub charge_repeated: bool = false,
        /// Whether a tag must occur exactly once to count.
        pub once: bool = false,
    }
    kind: "format_incremental",
    range: "at most 1",
    typical_weight: "0.5 to 1.0",
    bounds: [f64::NEG_INFINITY, 1.0],
    formula: "(share of the opening and closing tags that occur; with once, exactly once) - \
              trailing_penalty x (characters after the last closing tag, white space around them \
              not counted; 0 where that tag is repeated, unless charge_repeated)",
}

impl Kind for FormatIncremental {
    fn build(&self, _: &BuildContext<'_>) -> Built {
        let (tags, p) = (Tags::new(&self.tags), self.clone());
        per_sample(move |input| {
            // Without the last tag nothing is after it: partial credit is kept.
            let trailing = tags.after_last(&input.text, p.charge_repeated).map_or("", trim);
            let penalty = p.trailing_penalty * trailing.chars().count() as f64;
            Some(tags.share(&input.text, p.once) - penalty)
        })
    }
}

/// What may be between two pairs of tags.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BetweenPairs {
    /// Any text.
    #[default]
    Any,
    /// White space, as in the guides to GRPO with TRL.
    Space,
}

define_kind! {
    pub struct FormatSoft {
        /// Names of the tags, without angle brackets.
        pub tags: Vec<String> = reasoning_and_answer() => tags(),
        /// What may be between two pairs of tags.
        pub between: BetweenPairs = BetweenPairs::Any,
    }
    kind: "format_soft",
    range: "0 or 1",
    typical_weight: "0.5",
    formula: "1 if the opening and closing tags occur in order, with any text around them and any \
              text (between = \"space\": white space) between the pairs, else 0",
}

impl Kind for FormatSoft {
    fn build(&self, _: &BuildContext<'_>) -> Built {
        let tags = Tags::new(&self.tags);
        if self.between == BetweenPairs::Any {
            return per_sample(move |input| Some(indicator(tags.are_in_order(&input.text))));
        }
        let pattern = compile("tags", &tags.adjacent())?;
        per_sample(move |input| Some(indicator(pattern.is_match(&input.text))))
    }
}

define_kind! {
    /// After `format_reward` of the Hugging Face course's chapter on GRPO in TRL.
    pub struct ThinkGraded {
        /// Fewest characters of reasoning that earn 1.
        pub min_reasoning: u32 = 21,
        /// The value of the format with shorter reasoning or a blank answer.
        pub partial: f64 = 0.5 => between(0.0, 1.0),
    }
    kind: "think_graded",
    typical_weight: "0.5 to 1.0",
    formula: "0 unless <think>...</think>, white space, <answer>...</answer> occurs; 1 if the first \
              such reasoning has min_reasoning characters and its answer is not blank, both \
              trimmed; else partial",
}

impl Kind for ThinkGraded {
    fn build(&self, _: &BuildContext<'_>) -> Built {
        let (partial, fewest) = (self.partial, usize::try_from(self.min_reasoning));
        let fewest = fewest.unwrap_or(usize::MAX);
        // The first boundary ends the first reasoning for which a match exists. A pattern of the whole
        // text, with captures, would take longer than in proportion to the text.
        let boundary = compile("kind", &format!("</think>{PYTHON_SPACES}<answer>"))?;
        per_sample(move |input| {
            let parts = |text| {
                let (_, rest) = str::split_once(text, "<think>")?;
                let between = boundary.find(rest)?;
                let (answer, _) = rest[between.end()..].split_once("</answer>")?;
                Some((trim(&rest[..between.start()]), trim(answer)))
            };
            let Some((reasoning, answer)) = parts(&input.text) else { return Some(0.0) };
            let is_full = reasoning.chars().count() >= fewest && !answer.is_empty();
            Some(if is_full { 1.0 } else { partial })
        })
    }
}

define_kind! {
    pub struct JsonValid {
        /// Whether the content of the first fenced block counts, where there is one.
        pub fenced: bool = false,
    }
    kind: "json_valid",
    range: "0 or 1",
    typical_weight: "0.5 to 1.0",
    formula: "1 if the completion (or, with fenced, its first fenced block) is one JSON value, \
              else 0",
}

impl Kind for JsonValid {
    fn build(&self, _: &BuildContext<'_>) -> Built {
        let fenced = self.fenced;
        per_sample(move |input| {
            let read = serde_json::from_str::<IgnoredAny>(json_text(&input.text, fenced));
            Some(indicator(read.is_ok()))
        })
    }
}

/// The completion, or its first fenced block if `fenced` is true and there is one. The closing fence may be at the
/// end of the last line, where models put it.
pub fn json_text(text: &str, fenced: bool) -> &str {
    let block = || Some(fenced_blocks(text).first()?.content.trim_end().trim_end_matches("```"));
    if fenced { block().unwrap_or(text) } else { text }
}

#[cfg(test)]
mod tests;
