//! `hone init`: a starter configuration for one's own model, with prompts from which a first run learns.

use std::fmt::Write as _;
use std::io::{self, BufRead, Write as _};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::ValueEnum;
use toml::Value;

use crate::usage;

const CONFIGURATION: &str = "hone.toml";
const PROMPTS: &str = "prompts.jsonl";
/// Questions that the embedded model answers, but not in the rewarded form.
const ADDITIONS: &str = include_str!("../datasets/additions.jsonl");
/// Questions that a small instruction-tuned model can learn.
const WORD_PROBLEMS: &str = include_str!("../datasets/word-problems.jsonl");

/// What teaches the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Teacher {
    /// A dataset of prompts with their answers, and a grader that compares
    Answers,
    /// The users, who rate what they are served
    Feedback,
}

/// What `hone init` writes; `None` is asked for on a terminal, and else has its default.
#[derive(Debug, Default)]
pub(crate) struct Starter {
    pub(crate) model: Option<String>,
    pub(crate) teacher: Option<Teacher>,
    pub(crate) dataset: Option<String>,
}

impl Starter {
    /// Asks for what is not set; an empty answer keeps the default.
    ///
    /// # Errors
    /// If the terminal cannot be read, or an answer is no choice.
    pub(crate) fn ask(
        &mut self,
        input: &mut impl BufRead,
        output: &mut impl io::Write,
    ) -> anyhow::Result<()> {
        let mut question = |text: &str| -> anyhow::Result<Option<String>> {
            write!(output, "{text}: ")?;
            output.flush()?;
            let mut line = String::new();
            input.read_line(&mut line).context("standard input")?;
            Ok(Some(line.trim().to_owned()).filter(|line| !line.is_empty()))
        };
        if self.model.is_none() {
            self.model = question("Model: a directory, hub id or GGUF file [the built-in model]")?;
        }
        if self.teacher.is_none() && self.dataset.is_none() {
            let text = "Learn from the `answers` of a dataset, or from users' `feedback` [answers]";
            let chosen = question(text)?.map(|name| Teacher::from_str(&name, true));
            self.teacher = chosen.transpose().map_err(|name| {
                usage(anyhow::anyhow!("{name}: it must be `answers` or `feedback`"))
            })?;
        }
        if self.dataset.is_none() && self.teacher != Some(Teacher::Feedback) {
            self.dataset = question("Dataset: a file, or hf://OWNER/NAME [example prompts]")?;
        }
        Ok(())
    }

    /// Writes the files into `target`, which is created, and returns the commands to continue with.
    ///
    /// # Errors
    /// A [`UsageError`](crate::UsageError) if a file exists already or the dataset does not, or why a file cannot be
    /// written.
    pub(crate) fn write(&self, target: &Path) -> anyhow::Result<String> {
        let dataset = self.dataset.as_deref();
        if let Some(path) = dataset.filter(|path| !path.starts_with("hf://")) {
            let missing = || usage(anyhow::anyhow!("--dataset: {path} does not exist"));
            Path::new(path).exists().then_some(()).ok_or_else(missing)?;
        }
        let mut files = vec![(CONFIGURATION, self.configuration()?)];
        if self.teacher() == Teacher::Answers && dataset.is_none() {
            let prompts = if self.model.is_none() { ADDITIONS } else { WORD_PROBLEMS };
            files.push((PROMPTS, prompts.to_owned()));
        }
        for (name, _) in &files {
            let file = target.join(name);
            let refused = format!("{} exists already, and is not replaced", file.display());
            if file.exists() {
                return Err(usage(anyhow::Error::msg(refused)));
            }
        }
        std::fs::create_dir_all(target).with_context(|| target.display().to_string())?;
        let mut done = String::new();
        for (name, text) in &files {
            let file = target.join(name);
            let place = || format!("{} cannot be written", file.display());
            let mut created = std::fs::File::create_new(&file).with_context(place)?;
            created.write_all(text.as_bytes()).with_context(place)?;
            writeln!(done, "wrote {}", file.display())?;
        }
        writeln!(done, "\nNext:\n{}", self.next(target))?;
        Ok(done)
    }

    fn teacher(&self) -> Teacher {
        self.teacher.unwrap_or(Teacher::Answers)
    }

    /// The commands after this one, of which the first learns.
    fn next(&self, target: &Path) -> String {
        let enter = format!("  cd {}\n  hone validate {CONFIGURATION}\n", target.display());
        enter
            + match (self.teacher(), &self.model) {
                (Teacher::Answers, _) => {
                    "  hone train --config hone.toml\n  hone serve --config hone.toml"
                }
                (Teacher::Feedback, None) => {
                    "  hone serve --config hone.toml\nand, in a second terminal, users who ask and \
                     rate:\n  hone demo --server http://localhost:8080"
                }
                (Teacher::Feedback, Some(_)) => {
                    "  hone serve --config hone.toml\nand rate the answers that it serves: POST \
                     /v1/feedback"
                }
            }
    }

    fn configuration(&self) -> anyhow::Result<String> {
        let mut text = String::from(
            "# Written by `hone init`. Paths are relative to the directory that Hone starts in, so start it in\n\
             # this one:\n#\n#     hone validate hone.toml\n",
        );
        let train = "#     hone train --config hone.toml\n";
        text += if self.teacher() == Teacher::Answers { train } else { "" };
        text += "#     hone serve --config hone.toml\n#\n\
                 # `hone validate` refuses an unknown key. configs/default.toml of the release has every key with its\n\
                 # default.\n\n[model]\n\
                 # A Hugging Face directory, a GGUF file or a hub id. Without it the model in the binary is used, a toy\n\
                 # that can add.\n";
        match &self.model {
            Some(model) => writeln!(text, "path = {}", absolute(model)?)?,
            None => text += "# path = \"OWNER/NAME\"\n",
        }
        text += HEAD;
        match self.teacher() {
            Teacher::Answers => self.add_answers(&mut text)?,
            Teacher::Feedback => self.add_feedback(&mut text),
        }
        Ok(text)
    }

    /// The sections for learning from a dataset.
    fn add_answers(&self, text: &mut String) -> anyhow::Result<()> {
        let embedded = self.model.is_none();
        text.push_str(
            "\n[dataset]\n\
             # JSONL, CSV or Parquet, or a dataset of the hub as \"hf://OWNER/NAME\": a column `prompt` (or `messages`)\n\
             # and a column `answer`. docs/datasets.md has the keys for other columns.\n",
        );
        match &self.dataset {
            Some(dataset) => {
                writeln!(text, "path = {}", absolute(dataset)?)?;
                text.push_str("# The share of the prompts that is never trained on, to measure progress.\nheld_out = 0.1\n");
            }
            None => {
                writeln!(text, "path = \"{PROMPTS}\"")?;
                text.push_str(
                    "# Prompts that are never trained on; they measure progress.\nheld_out = 60\n",
                );
            }
        }
        if self.dataset.is_none() && !embedded {
            text.push_str(EXAMPLES);
        }
        let (max_tokens, samples) = if embedded { (40, 64) } else { (128, 32) };
        let steps = if embedded { 40 } else { 75 };
        write!(
            text,
            "\n[rollout]\n# Completions of each prompt, which are compared with each other.\ngroup_size = 8\n\
             # The longest completion, in tokens.\nmax_tokens = {max_tokens}\n\
             \n[train]\n# `hone train` ends here; a larger number continues. `hone serve` stops training there too: 0 is no end.\n\
             max_steps = {steps}\n\
             # Completions for each optimizer step: groups of eight.\nsamples_per_step = {samples}\n"
        )?;
        if embedded {
            text.push_str("# For the model in the binary. Remove both for your own: the default follows its size.\n\
                           learning_rate = 2e-3\nwarmup_steps = 2\n");
        }
        text.push_str(
            "\n[policy]\n# Every step publishes a version. The run measures held-out prompts itself. For a server with users,\n\
             # remove both keys: then a version must pass an exam first (docs/safety.md).\n\
             promotion = \"direct\"\npublish_every = 1\n\n[[route]]\nname = \"default\"\n\n[[route.reward]]\nname = \"correct\"\n\
             # The number in <answer>...</answer>, or else the last one, must equal the row's answer. Others are\n\
             # exact_match, math_equal, contains, code and python: `hone rewards list` describes all.\n\
             kind = \"numeric_match\"\n",
        );
        if self.dataset.is_none() {
            text.push_str("\n[[route.reward]]\nname = \"form\"\n\
                 # A quarter for each of <reasoning>, </reasoning>, <answer> and </answer>: a reward with values in between\n\
                 # teaches where right answers are still rare.\nkind = \"format_incremental\"\n");
        }
        Ok(())
    }

    /// The sections for learning from users.
    fn add_feedback(&self, text: &mut String) {
        text.push_str("\n[train]\n# A step for every 32 rated answers.\nsamples_per_step = 32\n");
        if self.model.is_none() {
            text.push_str("# The model in the binary needs no long warm-up.\nwarmup_steps = 2\n");
        }
        text.push_str(
            "\n[[route]]\nname = \"default\"\n\n[[route.reward]]\n\
             # Clients rate an answer with POST /v1/feedback: {\"completion_id\": ..., \"name\": \"thumbs\", \"value\": 1}\n\
             name = \"thumbs\"\nkind = \"feedback\"\n\
             # true or false, 1 or 0. For stars write range = [1, 5] instead.\ntype = \"boolean\"\n",
        );
    }
}

/// The sections that every starter has.
const HEAD: &str = r#"
[data]
# The ledger, the adapters and the checkpoints. It belongs to one model.
dir = "hone-data"

[engine]
# Hone's own engine, which decodes all requests in one batch. The other one is "mistralrs".
backend = "native"

[server]
bind = "127.0.0.1:8080"
# An address that other machines reach needs keys: draw one with `openssl rand -hex 32`, and set the variables
# HONE_SERVER_CLIENT_KEYS and HONE_SERVER_ADMIN_KEYS instead of writing it here.
"#;

/// What a small model needs to find the rewarded form at all.
const EXAMPLES: &str = r#"system_prompt = "Solve the problem. Answer as <reasoning>...</reasoning><answer>...</answer>, with nothing but the number in the answer."
# Worked examples. Without them a small model may never earn a reward, and then there is nothing to compare.
few_shot = [
    { user = "Mia has 12 cards and buys 5 more. How many cards does Mia have now?", assistant = "<reasoning>12 + 5 = 17</reasoning><answer>17</answer>" },
    { user = "Leo has 20 nuts and eats 8. How many nuts are left?", assistant = "<reasoning>20 - 8 = 12</reasoning><answer>12</answer>" },
]
"#;

/// A file as an absolute path, because Hone may start elsewhere; an id as it is. Quoted for TOML.
fn absolute(name: &str) -> anyhow::Result<Value> {
    let path = PathBuf::from(name);
    let path = if path.exists() { std::path::absolute(path)? } else { path };
    Ok(Value::String(path.display().to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(starter: &Starter) -> toml::Table {
        starter.configuration().unwrap().parse().unwrap()
    }

    #[test]
    fn names_are_quoted_and_files_are_absolute() {
        let file = tempfile::NamedTempFile::with_prefix("a \"b\"").unwrap();
        let name = file.path().display().to_string();
        let config = parsed(&Starter { model: Some(name.clone()), ..Starter::default() });
        assert_eq!(config["model"]["path"].as_str(), Some(&*name));
        let id = Some("OWNER/NAME".to_owned());
        let config = parsed(&Starter { model: id.clone(), dataset: id, ..Starter::default() });
        assert_eq!(config["model"]["path"].as_str(), Some("OWNER/NAME"));
        assert!(config["dataset"].get("few_shot").is_none(), "the examples are not this dataset's");
        assert!(config["train"].get("learning_rate").is_none());
    }

    #[test]
    fn only_what_no_flag_sets_is_asked_for() {
        let ask = |mut starter: Starter, input: &str| {
            let mut shown = Vec::new();
            starter
                .ask(&mut input.as_bytes(), &mut shown)
                .map(|()| (starter, String::from_utf8(shown).unwrap().matches(": ").count()))
        };
        let (starter, _) = ask(Starter::default(), "m\n\nhf://a/b\n").unwrap();
        assert_eq!(starter.model.as_deref(), Some("m"));
        assert_eq!(
            (starter.teacher(), starter.dataset.as_deref()),
            (Teacher::Answers, Some("hf://a/b"))
        );
        let (starter, _) = ask(Starter::default(), "\nfeedback\n").unwrap();
        assert_eq!((starter.model.as_deref(), starter.teacher()), (None, Teacher::Feedback));
        let error = ask(Starter::default(), "\nstars\n").unwrap_err();
        assert!(error.is::<crate::UsageError>() && error.to_string().contains("stars"), "{error}");
        let flags =
            || Starter { model: Some("m".into()), dataset: Some("d".into()), teacher: None };
        assert_eq!(ask(flags(), "").unwrap().1, 0);
    }
}
