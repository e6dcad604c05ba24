//! Opening and closing tags in a completion.

use hone_core::config::{Checked, Problem, quoted};

/// A pattern of white space as [`hone_core::text::is_space`] defines it.
pub const PYTHON_SPACES: &str = r"[\s\x1c-\x1f]*";

/// The default of the parameter `tags`.
pub fn reasoning_and_answer() -> Vec<String> {
    ["reasoning", "answer"].map(str::to_owned).to_vec()
}

/// Checks the parameter `tags`: 1 to 16 different names of letters, digits, `_` and `-`.
pub fn check_tags(tags: &[String]) -> Checked {
    if !(1..=16).contains(&tags.len()) {
        let shown = format!("a list of {}", tags.len());
        return Err(Problem::value("tags", shown, "a list of 1 to 16 names of tags"));
    }
    for (i, tag) in tags.iter().enumerate() {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
        let fits = (1..=64).contains(&tag.len()) && tag.bytes().all(plain);
        if !fits || tags[..i].contains(tag) {
            let allowed = "1 to 64 letters, digits, '_' or '-', each tag once";
            return Err(Problem::value(&format!("tags[{i}]"), quoted(tag), allowed));
        }
    }
    Ok(())
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
