//! Finds the code in a completion.

use super::params::{BlockChoice, CodeLanguage};
use crate::text::fenced_blocks;

/// The first or last fenced block of a completion that names `language`, or if no block does, that
/// names none; `None` without such a block.
pub(super) fn block(text: &str, choice: BlockChoice, language: CodeLanguage) -> Option<&str> {
    let own: &[&str] = match language {
        CodeLanguage::Python => &["python", "python3", "py", "py3"],
        CodeLanguage::Rhai => &["rhai"],
    };
    // Blocks that name the language, and blocks without a name.
    let mut found: [Vec<&str>; 2] = Default::default();
    let mut keep = |info: &str, content| {
        let name = info.trim_start_matches(['{', '.', ' ']);
        let name = name.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
        if own.contains(&name.to_lowercase().as_str()) {
            found[0].push(content);
        } else if info.is_empty() {
            found[1].push(content);
        }
    };
    for block in fenced_blocks(text) {
        keep(block.info, block.content);
    }
    let blocks = found.iter().find(|blocks| !blocks.is_empty())?;
    let chosen = match choice {
        BlockChoice::First => blocks.first(),
        BlockChoice::Last => blocks.last(),
    };
    chosen.copied()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn last_block(text: &str) -> &str {
        block(text, BlockChoice::Last, CodeLanguage::Python).unwrap_or(text)
    }

    #[test]
    fn the_first_block_is_taken_on_request() {
        let first = |text| block(text, BlockChoice::First, CodeLanguage::Python);
        assert_eq!(first("a\n```python\nx = 1\n```\nb\n```\ny\n```\nend"), Some("x = 1\n"));
        assert_eq!(first("```\nx\n```\n```\nopen"), Some("x\n"));
        assert_eq!(first("```\nopen"), Some("open"));
        assert_eq!(first("```\n```"), Some(""));
        assert_eq!(first("x = 1"), None);
    }

    #[test]
    fn the_last_block_is_taken() {
        assert_eq!(last_block("a\n```python\nx = 1\n```\nb\n```py\ny\nz\n```\nend"), "y\nz\n");
        assert_eq!(last_block("x = 1"), "x = 1");
        assert_eq!(last_block("```py\nx = 1"), "x = 1");
        assert_eq!(last_block("```\n"), "");
        assert_eq!(last_block("````\n```\ninner\n```\n````"), "```\ninner\n```\n");
        assert_eq!(last_block("~~~\na\n```\nb\n~~~"), "a\n```\nb\n");
        assert_eq!(last_block("```inline```"), "```inline```");
        assert_eq!(last_block("    ```\nnot a fence"), "    ```\nnot a fence");
        assert_eq!(last_block("```\r\nx\r\n```\r\n"), "x\r\n");
    }

    #[test]
    fn blocks_of_other_languages_and_outputs_are_no_answer() {
        let answer = |name: &str, rest: &str| {
            last_block(&format!("```{name}\nx = 1\n```\n{rest}")).to_owned()
        };
        for name in ["python", "Python", "py", "python3", "python title=\"a\"", "{.python}"] {
            for rest in ["Output:\n```\n5\n```", "```bash\npython a.py\n```", "```text\nopen"] {
                assert_eq!(answer(name, rest), "x = 1\n", "{name} {rest}");
            }
        }
        assert_eq!(answer("", "```bash\npython a.py\n```"), "x = 1\n");
        assert_eq!(block("```bash\nls\n```", BlockChoice::Last, CodeLanguage::Python), None);
        assert_eq!(block("```rhai\n1\n```", BlockChoice::Last, CodeLanguage::Rhai), Some("1\n"));
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
