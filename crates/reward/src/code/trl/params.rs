//! The parameters of `kind = "python"`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use hone_core::config::range::between;
use hone_core::config::{Checked, Problem, quoted};

use crate::kinds::define::parameters;

/// The form in which a function gets prompts and completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PromptForm {
    /// Lists of messages, as TRL passes for conversational datasets.
    Chat,
    /// Texts, as TRL passes for datasets of plain text: the last user message and the completion.
    Text,
}

/// What a function gets for an entry of the metadata, which is always a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ColumnType {
    /// The text.
    Text,
    /// The JSON value that the text contains; the text if it contains none.
    Json,
}

parameters! {
    /// Parameters of `kind = "python"`.
    pub struct PythonParams {
        /// The Python file with the function, relative to the working directory. It is read once, at
        /// start.
        pub path: PathBuf = PathBuf::new(),
        /// The Python itself, instead of `path`.
        pub source: String = String::new(),
        /// The function's name. It may be empty if one function alone has an argument `completions`.
        pub function: String = String::new(),
        /// Whether prompts and completions are lists of messages or texts.
        pub format: PromptForm = PromptForm::Chat,
        /// Types of columns. Others are JSON if they contain a list or an object, and else text.
        pub columns: BTreeMap<String, ColumnType> = BTreeMap::new(),
        /// Time of one call, which scores a group, in milliseconds; 10 to 600,000.
        pub timeout_ms: u64 = 10_000,
        /// Memory of one call, in MiB; 32 to 65,536.
        pub memory_mb: u64 = 512,
    }
}

impl PythonParams {
    /// Checks every range, and that there is one source.
    ///
    /// # Errors
    /// The first key with a wrong value.
    pub fn check(&self) -> Checked {
        let path = self.path.to_string_lossy();
        match (path.is_empty(), self.source.trim().is_empty()) {
            (true, true) => return Err(Problem::new("path", " is missing: give it, or source")),
            (false, false) => {
                let allowed = "absent where source is given";
                return Err(Problem::value("path", quoted(&path), allowed));
            }
            _ => {}
        }
        between("timeout_ms", self.timeout_ms, 10, 600_000)?;
        between("memory_mb", self.memory_mb, 32, 65_536)
    }

    /// The name of the source in tracebacks.
    pub(super) fn file(&self) -> String {
        match self.path.as_os_str().is_empty() {
            true => "<source>".to_owned(),
            false => self.path.display().to_string(),
        }
    }

    /// Why the source cannot be used, as an error of its key.
    pub(super) fn wrong_source(&self, why: &str) -> Problem {
        match self.path.as_os_str().is_empty() {
            true => Problem::new("source", format!(" {why}")),
            false => {
                let path = quoted(&self.path.to_string_lossy());
                Problem::new("path", format!(" is {path}, which {why}"))
            }
        }
    }
}
