//! The commands in the documents work: Hone's parser accepts its own, and scripts, flags and files
//! of all commands exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory};

use hone::cli::Cli;
use hone::config::environment_names;
use hone_bench::Bench;

use super::documents::{FOLDERS, documents};
use super::root;

/// Options of Hone whose value is a file or directory that the command writes.
const WRITTEN: &[&str] =
    &["json", "merged", "output", "peft", "report", "target", "to", "write_model"];

/// Values that are a model without a path.
const MODELS: &[&str] = &["embedded", "100m", "100m-bf16"];

/// The simple commands of a document, each as words, without prompts and comments. The flag
/// is true for commands in blocks, which are complete, and false for names in backquotes such as
/// `hone db`.
fn commands(text: &str) -> Vec<(Vec<String>, bool)> {
    let (mut lines, mut prose) = (vec![String::new()], String::new());
    let mut fence: Option<&str> = None;
    for line in text.lines() {
        let indented = line.starts_with("    hone ");
        let line = line.trim();
        if let Some(language) = line.strip_prefix("```") {
            fence = if fence.is_some() { None } else { Some(language) };
        } else if indented || fence.is_some_and(|f| ["sh", "console", "bash"].contains(&f)) {
            let line = line.trim_start_matches("$ ");
            let last = lines.last_mut().unwrap();
            match line.strip_suffix('\\') {
                Some(part) => last.push_str(part),
                None => {
                    last.push_str(line);
                    lines.push(String::new());
                }
            }
        } else if fence.is_none() {
            prose.push_str(line);
            prose.push(if line.is_empty() { '\n' } else { ' ' });
        }
    }
    let quoted = prose.lines().flat_map(|paragraph| paragraph.split('`').skip(1).step_by(2));
    let complete = lines.iter().map(|line| (line.as_str(), true));
    let mut all = Vec::new();
    for (line, complete) in complete.chain(quoted.map(|quoted| (quoted, false))) {
        // A text in prose may have a single quote.
        let words = shlex::split(line)
            .unwrap_or_else(|| line.split_whitespace().map(str::to_owned).collect());
        let simple = words.split(|word| ["|", "||", "&", "&&", ";", ">"].contains(&word.as_str()));
        all.extend(simple.filter(|s| !s.is_empty()).map(|s| (s.to_vec(), complete)));
    }
    all
}

/// Whether a path in a document is the reader's: a placeholder in capitals, absolute, or ignored by
/// git as data of a run.
fn is_own(path: &str) -> bool {
    let ignored =
        || Command::new("git").args(["check-ignore", "-q", path]).current_dir(root()).status();
    path.starts_with('/')
        || path.chars().all(|c| c.is_ascii_uppercase() || c == '_')
        || ignored().unwrap().success()
}

/// Checks that a path exists, from the repository's root or from the document's folder.
fn check_path(document: &str, path: &str) -> Result<(), String> {
    let folder = root().join(document).parent().unwrap().to_owned();
    if root().join(path).exists() || folder.join(path).exists() || is_own(path) {
        return Ok(());
    }
    Err(format!("{path} does not exist"))
}

/// The files and directories that a command of Hone reads.
fn inputs(command: &clap::Command, matches: &ArgMatches) -> Vec<String> {
    let (mut command, mut matches) = (command, matches);
    while let Some((name, inner)) = matches.subcommand() {
        (command, matches) = (command.find_subcommand(name).unwrap(), inner);
    }
    let is_path = |argument: &&clap::Arg| {
        let names = argument.get_value_names().unwrap_or_default();
        let path =
            names.iter().any(|n| ["FILE", "DIR", "DIR|HUB_ID", "MODEL"].contains(&n.as_str()));
        path && !WRITTEN.contains(&argument.get_id().as_str())
    };
    let ids = command.get_arguments().filter(is_path).map(|argument| argument.get_id().as_str());
    let shown = ids.filter(|id| matches.value_source(id) == Some(ValueSource::CommandLine));
    let values = shown.flat_map(|id| matches.get_raw(id).unwrap());
    let values = values.map(|value| value.to_str().unwrap().to_owned());
    values.filter(|value| !MODELS.contains(&value.as_str())).collect()
}

pub(super) fn check_hone(
    document: &str,
    arguments: &[String],
    complete: bool,
) -> Result<(), String> {
    check_parsed(Cli::command(), document, arguments, complete)
}

/// Checks the arguments of a program of Hone. A name in backquotes may leave out what the command requires.
fn check_parsed(
    program: clap::Command,
    document: &str,
    arguments: &[String],
    complete: bool,
) -> Result<(), String> {
    let words = [program.get_name().to_owned()].into_iter().chain(arguments.iter().cloned());
    match program.clone().try_get_matches_from(words) {
        Ok(matches) => {
            inputs(&program, &matches).iter().try_for_each(|path| check_path(document, path))
        }
        Err(error) => match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Ok(()),
            ErrorKind::MissingRequiredArgument
            | ErrorKind::MissingSubcommand
            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
                if !complete =>
            {
                Ok(())
            }
            _ => Err(error.to_string()),
        },
    }
}

/// Checks that the script exists, and that it or a file beside it contains each flag.
fn check_python(arguments: &[String]) -> Result<(), String> {
    let Some(script) = arguments.first().filter(|first| !first.starts_with('-')) else {
        return Ok(());
    };
    let folder = root().join(script).parent().unwrap().to_owned();
    if !root().join(script).exists() {
        return Err(format!("{script} does not exist"));
    }
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let scripts = files.filter(|path| path.extension().is_some_and(|e| e == "py"));
    let text: String = scripts.map(|path| fs::read_to_string(path).unwrap()).collect();
    let flags = arguments.iter().filter(|a| a.starts_with("--"));
    let mut missing = flags.filter(|flag| !text.contains(&format!("\"{flag}\"")));
    missing.next().map_or(Ok(()), |flag| Err(format!("{script} has no {flag}")))
}

/// Checks one command and returns its name for `every_command_in_the_documents_works`.
fn check(document: &str, words: &[String], complete: bool) -> Result<String, String> {
    let variable = |word: &String| word.split_once('=').map(|(name, _)| name.to_owned());
    let variables: Vec<String> = words.iter().map_while(variable).collect();
    let (assignments, words) = words.split_at(variables.len());
    let Some((program, arguments)) = words.split_first() else { return Ok(assignments.join(" ")) };
    for name in variables.iter().filter(|name| name.starts_with("HONE_")) {
        if !environment_names().iter().any(|(known, _)| known == name) {
            return Err(format!("{name} is not the variable of a key"));
        }
    }
    let program = Path::new(program).file_name().unwrap_or_default().to_str().unwrap();
    let cargo = ["cargo", "run", "--release", "--"];
    if program == "hone" || words.iter().take(4).eq(cargo) {
        let arguments = if program == "hone" { arguments } else { &words[4..] };
        check_hone(document, arguments, complete)?;
        return Ok(format!("hone {}", arguments.first().map_or("", String::as_str)));
    }
    if program == "hone-bench" {
        check_parsed(Bench::command(), document, arguments, complete)?;
        return Ok(program.to_owned());
    }
    if complete || program.starts_with("python") {
        for word in words.iter().filter(|w| FOLDERS.split(' ').any(|folder| w.starts_with(folder)))
        {
            check_path(document, word)?;
        }
    }
    if program.starts_with("python") {
        check_python(arguments)?;
    }
    if let Some(at) = arguments.iter().position(|a| program == "cargo" && a == "-p") {
        let folder = arguments[at + 1].replace("hone-", "crates/");
        check_path(document, &folder)?;
    }
    Ok(format!("{program} {}", arguments.first().map_or("", String::as_str)))
}

#[test]
fn every_command_in_the_documents_works() {
    let (mut seen, mut wrong) = (BTreeSet::new(), Vec::new());
    for (document, text) in documents() {
        for (words, complete) in commands(&text) {
            match check(&document, &words, complete) {
                Ok(name) => {
                    seen.insert(name);
                }
                Err(error) => wrong.push(format!("{document}: {}: {error}", words.join(" "))),
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    for promised in
        ["hone demo", "hone serve", "hone-bench", "cargo test", "python examples/webhook_server.py"]
    {
        assert!(seen.contains(promised), "no document shows {promised}: {seen:?}");
    }
}
