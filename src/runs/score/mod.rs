//! `hone rewards test`: scores completions from a file. Nothing is generated or trained.

mod read;
mod without_config;

use hone_reward::routes::RewardConfig;
use hone_reward::{Route, ScoreInput};

use super::eval_set::score;
use super::table::ScoredSample;

pub use read::read;
pub use without_config::route;

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
