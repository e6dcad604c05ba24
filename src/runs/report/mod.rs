//! The final report of a run: a folder with `report.md` and its plots as SVG.
//!
//! Everything comes from a [`RunReport`], which serialises: the same report gives the same bytes.

mod markdown;
mod plots;
pub mod svg;

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use hone_core::types::{StepRecord, UnixMillis};
use hone_train::monitoring::warnings::Warning;

use super::early_stop::Best;
use super::stats::Estimate;

/// The report's file name.
pub const REPORT_FILE: &str = "report.md";

/// A file of the report cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("{}: {source}", path.display())]
pub struct ReportError {
    /// The file or the folder.
    pub path: PathBuf,
    /// What the file system said.
    pub source: io::Error,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// All steps that were asked for.
    Finished,
    /// No better held-out reward for as long as patience lasts.
    EarlyStop,
    /// The operator ended it.
    Interrupted,
    /// Something went wrong; what.
    Failed(String),
}

/// One figure of the held-out prompts before the first step and after the last.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// The part's name, `pass@4`, `total`.
    pub name: String,
    /// Before; `None` where it could not be computed.
    pub before: Option<Estimate>,
    /// After.
    pub after: Option<Estimate>,
    /// After minus before, over the same prompts.
    pub difference: Option<Estimate>,
}

/// One held-out prompt with a completion of either policy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplePair {
    /// What was asked.
    pub prompt: String,
    /// The completion before and its reward.
    pub before: Option<(String, Option<f64>)>,
    /// The completion after and its reward.
    pub after: Option<(String, Option<f64>)>,
}

/// Everything the report is told from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunReport {
    /// The run's name.
    pub name: String,
    /// The model that was trained.
    pub model: String,
    /// When the run began.
    pub started: UnixMillis,
    /// When it ended.
    pub ended: UnixMillis,
    /// How it ended.
    pub ending: Ending,
    /// Key and value of what matters of the configuration, in the order they are shown.
    pub configuration: Vec<(String, String)>,
    /// Every step's figures.
    pub steps: Vec<StepRecord>,
    /// Step and mean held-out reward of each evaluation; step 0 is before training.
    pub held_out: Vec<(u64, f64)>,
    /// Held-out figures before and after.
    pub comparisons: Vec<Comparison>,
    /// Completions before and after.
    pub samples: Vec<SamplePair>,
    /// The warnings in the order they were raised.
    pub warnings: Vec<Warning>,
    /// The best evaluation.
    pub best: Option<Best>,
    /// Where its checkpoint is.
    pub best_checkpoint: Option<String>,
}

impl RunReport {
    /// The report's text, which names the files of [`Self::plots`].
    pub fn markdown(&self) -> String {
        markdown::render(self)
    }

    /// File name and content of each plot; figures that no step has are left out.
    pub fn plots(&self) -> Vec<(String, String)> {
        plots::all(self).into_iter().map(|plot| (plot.file, plot.svg)).collect()
    }

    /// Writes the text and the plots to a folder, which is made; files of an earlier report are
    /// written over. Returns the path of the text.
    ///
    /// # Errors
    /// If the folder or a file cannot be written.
    pub fn write(&self, folder: &Path) -> Result<PathBuf, ReportError> {
        let wrong = |path: &Path, source| ReportError { path: path.to_owned(), source };
        std::fs::create_dir_all(folder).map_err(|e| wrong(folder, e))?;
        let mut files = self.plots();
        files.push((REPORT_FILE.to_owned(), self.markdown()));
        for (name, text) in files {
            let path = folder.join(name);
            std::fs::write(&path, text).map_err(|e| wrong(&path, e))?;
        }
        Ok(folder.join(REPORT_FILE))
    }
}

#[cfg(test)]
mod tests;
