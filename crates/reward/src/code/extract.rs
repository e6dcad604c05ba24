//! Finds the code in a completion.

use super::params::BlockChoice;

/// The first or last fenced block of a completion; `None` if it has no fence.
///
/// A fence is a line of at least three backticks or tildes, indented by at most three spaces, then
/// the language; the block ends at a line of at least as many of the same character, or with the text
/// (CommonMark 0.31, 4.5).
pub(super) fn block(text: &str, choice: BlockChoice) -> Option<&str> {
    let mut found = None;
    let mut open: Option<(char, usize, usize)> = None;
    let mut position = 0;
    for line in text.split_inclusive('\n') {
        let (start, end) = (position, position + line.len());
        position = end;
        match (open, fence(line)) {
            (None, Some((mark, length, info))) if mark == '~' || !info.contains('`') => {
                open = Some((mark, length, end));
            }
            (Some((mark, length, begin)), Some((closing, count, "")))
                if closing == mark && count >= length =>
            {
                found = Some((begin, start));
                open = None;
                if choice == BlockChoice::First {
                    break;
                }
            }
            _ => {}
        }
    }
    if let Some((_, _, begin)) = open {
        found = Some((begin, text.len()));
    }
    found.and_then(|(begin, end)| text.get(begin..end))
}

/// Character, length and rest of a line that could be a fence.
fn fence(line: &str) -> Option<(char, usize, &str)> {
    let unindented = line.trim_start_matches(' ');
    let mark = unindented.chars().next().filter(|c| matches!(c, '`' | '~'))?;
    let rest = unindented.trim_start_matches(mark);
    let length = unindented.len() - rest.len();
    (line.len() - unindented.len() <= 3 && length >= 3).then(|| (mark, length, rest.trim()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn last_block(text: &str) -> &str {
        block(text, BlockChoice::Last).unwrap_or(text)
    }

    #[test]
    fn the_first_block_is_taken_on_request() {
        let first = |text| block(text, BlockChoice::First);
        assert_eq!(first("a\n```python\nx = 1\n```\nb\n```\ny\n```\nend"), Some("x = 1\n"));
        assert_eq!(first("```\nx\n```\n```\nopen"), Some("x\n"));
        assert_eq!(first("```\nopen"), Some("open"));
        assert_eq!(first("```\n```"), Some(""));
        assert_eq!(first("x = 1"), None);
    }

    #[test]
    fn the_last_block_is_taken() {
        assert_eq!(last_block("a\n```python\nx = 1\n```\nb\n```\ny\nz\n```\nend"), "y\nz\n");
        assert_eq!(last_block("x = 1"), "x = 1");
        assert_eq!(last_block("```py\nx = 1"), "x = 1");
        assert_eq!(last_block("```\n"), "");
        assert_eq!(last_block("````\n```\ninner\n```\n````"), "```\ninner\n```\n");
        assert_eq!(last_block("~~~\na\n```\nb\n~~~"), "a\n```\nb\n");
        assert_eq!(last_block("```inline```"), "```inline```");
        assert_eq!(last_block("    ```\nnot a fence"), "    ```\nnot a fence");
        assert_eq!(last_block("```\r\nx\r\n```\r\n"), "x\r\n");
    }

    proptest! {
        #[test]
        fn never_panics_and_returns_a_part(text in "([`~ \n\ra-cé]{0,6}\n?){0,12}") {
            prop_assert!(text.contains(last_block(&text)));
        }

        #[test]
        fn fenced_code_is_found(code in "[a-z =0-9\n]{0,80}", before in "[a-z \n]{0,20}") {
            let text = format!("{before}\n```python\n{code}\n```\nafter");
            prop_assert_eq!(last_block(&text), format!("{code}\n"));
        }
    }
}
