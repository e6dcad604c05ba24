//! Fenced blocks of Markdown.

/// A fenced block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FencedBlock<'t> {
    /// The rest of the opening fence's line, which names the language.
    pub info: &'t str,
    /// The lines between the fences.
    pub content: &'t str,
}

/// The fenced blocks of a text.
///
/// A fence is a line of at least three backticks or tildes, indented by at most three spaces, then
/// the language; the block ends at a line of at least as many of the same character, or with the text
/// (CommonMark 0.31, 4.5).
pub fn fenced_blocks(text: &str) -> Vec<FencedBlock<'_>> {
    let (mut blocks, mut position) = (Vec::new(), 0);
    let mut open: Option<(char, usize, usize, &str)> = None;
    let mut keep = |info, begin, end| {
        blocks.push(FencedBlock { info, content: text.get(begin..end).unwrap_or_default() });
    };
    for line in text.split_inclusive('\n') {
        let (start, end) = (position, position + line.len());
        position = end;
        match (open, fence(line)) {
            (None, Some((mark, length, info))) if mark == '~' || !info.contains('`') => {
                open = Some((mark, length, end, info));
            }
            (Some((mark, length, begin, info)), Some((closing, count, "")))
                if closing == mark && count >= length =>
            {
                keep(info, begin, start);
                open = None;
            }
            _ => {}
        }
    }
    if let Some((_, _, begin, info)) = open {
        keep(info, begin, text.len());
    }
    blocks
}

/// Character, length and rest of a line that could be a fence.
fn fence(line: &str) -> Option<(char, usize, &str)> {
    let unindented = line.trim_start_matches(' ');
    let mark = unindented.chars().next().filter(|c| matches!(c, '`' | '~'))?;
    let rest = unindented.trim_start_matches(mark);
    let length = unindented.len() - rest.len();
    (line.len() - unindented.len() <= 3 && length >= 3).then(|| (mark, length, rest.trim()))
}
