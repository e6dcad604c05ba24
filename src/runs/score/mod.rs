//! `hone rewards test`: scores completions from a file. Nothing is generated or trained.

mod read;

use anyhow::{Context, ensure};
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::Error;
use toml::{Table, Value};

use hone_reward::routes::{Preset, RewardConfig, RouteConfig};
use hone_reward::{Route, ScoreInput};

use super::eval_set::score;
use super::table::ScoredSample;

pub use read::read;

/// Scores the completions, and shows the answer that each of `parts` finds. Consecutive rows with the
/// same prompt form a group, which matters for parts that compare completions.
pub async fn run(
    route: &Route,
    parts: &[RewardConfig],
    inputs: Vec<ScoreInput>,
) -> Vec<ScoredSample> {
    let mut scored = Vec::with_capacity(inputs.len());
    let same =
        |a: &ScoreInput, b: &ScoreInput| a.messages == b.messages && a.metadata == b.metadata;
    for group in inputs.chunk_by(same) {
        for (input, (values, total)) in group.iter().zip(score(route, group).await) {
            let found = parts.iter().map(|part| (&part.name, part.kind.answer(&input.text)));
            scored.push(ScoredSample {
                prompt: input.messages.last().map(|m| m.content.clone()).unwrap_or_default(),
                completion: input.text.clone(),
                parts: values,
                total,
                extracted: found.filter_map(|(name, found)| Some((name.clone(), found?))).collect(),
            });
        }
    }
    scored
}

// The route of `hone rewards test` without a configuration.

/// A route with the parts of a preset and of `kinds`, each the name of a kind or a part as an inline
/// table of TOML. Without any, it has the three rewards that guides to GRPO begin with.
///
/// # Errors
/// If the preset or a kind does not exist, or a parameter is wrong.
pub fn route(name: &str, preset: Option<&str>, kinds: &[String]) -> anyhow::Result<RouteConfig> {
    let preset = match preset {
        Some(preset) => Some(named(preset)?),
        None => kinds.is_empty().then_some(Preset::Guides),
    };
    let rewards: Vec<RewardConfig> = kinds
        .iter()
        .map(|text| part(text).with_context(|| format!("--kind {text}")))
        .collect::<anyhow::Result<_>>()?;
    for (index, part) in rewards.iter().enumerate() {
        ensure!(
            rewards[..index].iter().all(|other| other.name != part.name),
            "--kind is given twice for a part named {}: set `name` in a table",
            part.name
        );
    }
    Ok(RouteConfig { name: name.to_owned(), preset, rewards, ..RouteConfig::default() })
}

fn named(preset: &str) -> anyhow::Result<Preset> {
    let deserializer = IntoDeserializer::<Error>::into_deserializer(preset);
    Preset::deserialize(deserializer).context("--preset")
}

/// A part, whose name is that of its kind unless the table contains another.
fn part(text: &str) -> anyhow::Result<RewardConfig> {
    let mut table = if text.trim_start().starts_with('{') {
        let mut document: Table = format!("part = {text}").parse().context("not TOML")?;
        match document.remove("part") {
            Some(Value::Table(table)) => table,
            _ => Table::new(),
        }
    } else {
        Table::from_iter([("kind".to_owned(), Value::String(text.to_owned()))])
    };
    if let (false, Some(kind)) = (table.contains_key("name"), table.get("kind").cloned()) {
        table.insert("name".to_owned(), kind);
    }
    let part = RewardConfig::try_from(table).map_err(anyhow::Error::msg)?;
    part.check().map_err(|problem| anyhow::Error::msg(problem.sentence()))?;
    Ok(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(preset: Option<&str>, kinds: &[&str]) -> Result<String, String> {
        let kinds: Vec<String> = kinds.iter().map(|kind| (*kind).to_owned()).collect();
        let route = route("default", preset, &kinds).map_err(|error| format!("{error:#}"))?;
        let parts = route.parts();
        let shown = parts.iter().map(|p| format!("{} {} {}", p.name, p.kind.name(), p.weight));
        Ok(shown.collect::<Vec<_>>().join(", "))
    }

    #[test]
    fn parts_are_named_by_their_kind() {
        let guides = "tags format_incremental 0.5, format format_soft 0.5, correct exact_match 2";
        assert_eq!(names(None, &[]).unwrap(), guides);
        let kinds = ["exact_match", "{ kind = 'length', ideal = 20, spread = 20, weight = 0.5 }"];
        assert_eq!(names(None, &kinds).unwrap(), "exact_match exact_match 1, length length 0.5");
        let parts = names(Some("question_answering"), &["exact_match"]).unwrap();
        assert!(parts.ends_with(", exact_match exact_match 1"), "{parts}");
    }

    #[test]
    fn wrong_parts_are_refused_by_name() {
        for (kind, start) in [
            ("exact_mach", "--kind exact_mach: kind is \"exact_mach\": it must be "),
            ("length", "--kind length: "),
            ("{ kind = 'length', ideal = }", "--kind { kind = 'length', ideal = }: not TOML"),
            ("{ weight = 1 }", "--kind { weight = 1 }: kind is missing: it must be "),
        ] {
            let error = names(None, &[kind]).unwrap_err();
            assert!(error.starts_with(start), "{error}");
        }
        let range = names(None, &["{ kind = 'numeric_match', tolerance = -1 }"]).unwrap_err();
        assert!(range.contains(": tolerance is -1: it must be "), "{range}");
        let twice = names(None, &["exact_match", "exact_match"]).unwrap_err();
        assert!(twice.starts_with("--kind is given twice for a part named exact_match"), "{twice}");
        let preset = names(Some("guide"), &[]).unwrap_err();
        assert!(preset.starts_with("--preset: unknown variant `guide`"), "{preset}");
    }
}
