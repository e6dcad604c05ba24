//! The final report of a run: a directory with `report.md` and its plots as SVG.
//!
//! A report is rendered from a [`RunReport`] alone: the same report gives the same bytes.

mod data;
mod markdown;
mod plots;
pub mod svg;

use std::path::{Path, PathBuf};

use hone_core::files::{FileError, at};

pub use data::{Comparison, Ending, RunReport, SamplePair};

/// The report's file name.
pub const REPORT_FILE: &str = "report.md";

impl RunReport {
    /// The text, which links to the files of [`Self::plots`].
    pub fn markdown(&self) -> String {
        markdown::render(self)
    }

    /// File name and content of each plot. Metrics that no step has have no plot.
    pub fn plots(&self) -> Vec<(String, String)> {
        plots::all(self).into_iter().map(|plot| (plot.file, plot.svg)).collect()
    }

    /// Writes the text and the plots to a directory, which is created if necessary, and replaces the
    /// files of an earlier report. Returns the path of the text.
    ///
    /// # Errors
    /// If the directory or a file cannot be written.
    pub fn write(&self, folder: &Path) -> Result<PathBuf, FileError> {
        std::fs::create_dir_all(folder).map_err(at(folder))?;
        let mut files = self.plots();
        files.push((REPORT_FILE.to_owned(), self.markdown()));
        for (name, text) in files {
            let path = folder.join(name);
            std::fs::write(&path, text).map_err(at(&path))?;
        }
        Ok(folder.join(REPORT_FILE))
    }
}

#[cfg(test)]
mod tests;
