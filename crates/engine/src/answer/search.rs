//! Searches text that arrives in pieces.

/// The first of `tags` in `text`, with its place in bytes; of two at one place the longer one.
pub(super) fn first<'t>(text: &str, tags: &'t [String]) -> Option<(usize, &'t str)> {
    let found = tags.iter().filter_map(|tag| Some((text.find(tag.as_str())?, tag.as_str())));
    found.min_by_key(|(at, tag)| (*at, std::cmp::Reverse(tag.len())))
}

/// Length in bytes of the longest end of `text` that is a proper beginning of one of `tags`.
pub(super) fn longest_overlap(text: &str, tags: &[String]) -> usize {
    tags.iter().map(|tag| overlap(text, tag)).max().unwrap_or(0)
}

/// Length in bytes of the longest end of `text` that is a proper beginning of `tag`.
pub(super) fn overlap(text: &str, tag: &str) -> usize {
    let longest = text.len().min(tag.len().saturating_sub(1));
    let fits = |n: &usize| {
        let end = text.len() - n;
        text.is_char_boundary(end) && tag.is_char_boundary(*n) && tag.get(..*n) == text.get(end..)
    };
    (1..=longest).rev().find(fits).unwrap_or(0)
}
