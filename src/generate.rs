//! `hone generate` on a terminal.

use std::io::{self, IsTerminal, Read, Write};
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, ensure};

use hone::app::generate::{GenerateOptions, GenerateSink};
use hone::cli::GenerateArgs;
use hone::{app, usage};
use hone_core::types::{Message, Role, SamplingParams};
use hone_engine::EngineError;
use hone_report::terminal::visible;

use crate::{Outcome, Output, print_note, run_config, runtime, set};

/// Writes completions as they are generated.
struct Terminal<'a> {
    out: &'a mut Output,
    /// Whether the text is written as JSON at the end instead.
    json: bool,
    /// Number of completions.
    samples: u64,
    /// The completion that was written last, counted from 1.
    last: u64,
    /// Whether the reader is a person, whom control characters of the model must not reach.
    is_terminal: bool,
}

impl GenerateSink for Terminal<'_> {
    fn weights(&mut self, label: &str) -> io::Result<()> {
        if !self.json {
            print_note(&format!("weights of {label}"));
        }
        Ok(())
    }

    fn text(&mut self, index: u64, text: &str) -> io::Result<()> {
        if self.json {
            return Ok(());
        }
        if self.last <= index {
            self.last = index + 1;
            if index > 0 {
                writeln!(self.out)?;
            }
            if self.samples > 1 {
                writeln!(self.out, "--- {} of {}", index + 1, self.samples)?;
            }
        }
        let keep = |c: char| match c {
            '\n' | '\t' => Some(c),
            _ if self.is_terminal => visible(c),
            _ => Some(c),
        };
        let shown: String = text.chars().filter_map(keep).collect();
        self.out.write_all(shown.as_bytes())?;
        self.out.flush()
    }
}

pub(super) fn run(args: GenerateArgs, out: &mut Output) -> Outcome {
    let weights = args.weights();
    let GenerateArgs { prompt, messages, system, json, samples, .. } = args;
    let config = run_config(args.config, |config| {
        set(&mut config.dataset.system_prompt, system);
        // Nothing else needs the cores.
        config.train.enabled = false;
    })?;
    let messages = match (prompt, messages) {
        (_, Some(file)) => read_messages(&file),
        (Some(content), None) => Ok(vec![Message::new(Role::User, content)]),
        (None, None) => read_prompt(),
    }
    .map_err(usage)?;
    let params = SamplingParams {
        temperature: args.temperature,
        top_p: args.top_p,
        max_tokens: args.max_tokens,
        seed: args.seed,
        ..SamplingParams::default()
    };
    let options = GenerateOptions { messages, weights, params, samples };
    let is_terminal = io::stdout().is_terminal();
    let mut terminal = Terminal { out, json, samples, last: 0, is_terminal };
    let generated = runtime()?.block_on(app::generate::run(&config, &options, &mut terminal));
    let generated = generated.map_err(|error| match error.downcast_ref() {
        Some(EngineError::Invalid(_) | EngineError::PromptTooLong { .. }) => usage(error),
        _ => error,
    })?;
    if json {
        writeln!(out, "{}", serde_json::to_string(&generated)?)?;
    } else {
        writeln!(out)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Reads the user's message from standard input.
fn read_prompt() -> anyhow::Result<Vec<Message>> {
    let mut input = io::stdin();
    ensure!(!input.is_terminal(), "PROMPT is missing: it must be an argument or standard input");
    let mut content = String::new();
    input.read_to_string(&mut content).context("standard input")?;
    ensure!(!content.trim().is_empty(), "PROMPT is missing: standard input is empty");
    Ok(vec![Message::new(Role::User, content)])
}

fn read_messages(file: &Path) -> anyhow::Result<Vec<Message>> {
    let place = || format!("--messages: {}", file.display());
    let text = std::fs::read_to_string(file).with_context(place)?;
    let messages: Vec<Message> = serde_json::from_str(&text).with_context(place)?;
    ensure!(!messages.is_empty(), "{} has no message", place());
    Ok(messages)
}
