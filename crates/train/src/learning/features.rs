//! Features of completions, and of those that clients rated in a batch: projections of the frozen base's final hidden states,
//! and how probable the base finds the text.

use std::collections::BTreeMap;
use std::ops::Range;

use candle_core::DType;

use hone_core::types::Group;
use hone_model::Model;

use super::map_shards;
use crate::data::batch_builder::TrainBatch;
use crate::data::head::project;
use crate::data::packing::PackedBatch;
use crate::error::Result;
use crate::memory;

/// The features of completions after their prompts, by forward passes of the base: the projected mean of the hidden states
/// over the completion's tokens, and the mean log-probability of these tokens in nats. An empty completion has none. Tokens
/// that consecutive texts have in common are computed once.
///
/// The log-probability is a feature because a model's mistakes are less probable to itself than its right answers
/// (Kadavath et al. 2022, "Language models (mostly) know what they know"), which a linear function of the states
/// cannot show.
///
/// # Errors
/// If a prompt is empty or an id is outside the vocabulary.
pub(crate) fn features(model: &Model, texts: &[(&[u32], &[u32])]) -> Result<Vec<Vec<f64>>> {
    if texts.is_empty() {
        return Ok(Vec::new());
    }
    let most = memory::shard_tokens(model.spec());
    let (mut shards, mut tokens): (Vec<Range<usize>>, usize) = (Vec::new(), most);
    for (index, (prompt, completion)) in texts.iter().enumerate() {
        tokens += prompt.len() + completion.len();
        match shards.last_mut().filter(|_| tokens <= most) {
            Some(shard) => shard.end = index + 1,
            None => {
                shards.push(index..index + 1);
                tokens = prompt.len() + completion.len();
            }
        }
    }
    let of_shards =
        map_shards(model.spec(), &shards, |shard| of_shard(model, &texts[shard.clone()]));
    Ok(of_shards.into_iter().collect::<Result<Vec<_>>>()?.concat())
}

fn of_shard(model: &Model, texts: &[(&[u32], &[u32])]) -> Result<Vec<Vec<f64>>> {
    // A pass has no row of a text's last token, so that one token is added to each.
    let longer: Vec<Vec<u32>> = texts.iter().map(|(_, ids)| [ids, &[0][..]].concat()).collect();
    let completions = texts.iter().zip(&longer).map(|((prompt, _), ids)| (*prompt, &ids[..], 1.0));
    let layout = PackedBatch::new(&completions.collect::<Vec<_>>(), model.device())?;
    let hidden = model.hidden(&layout.ids, &layout.segments, None, None)?;
    let stats = model.stats(&hidden, &layout.rows, &layout.targets, &layout.temperatures)?;
    let mut first = 0;
    let own = |(_, ids): &(&[u32], &[u32])| {
        let rows = layout.rows.narrow(0, first, ids.len() + 1)?;
        let logprobs = stats.narrow(0, first, ids.len())?.narrow(1, 0, 1)?.to_dtype(DType::F64)?;
        first += ids.len() + 1;
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        // The first row is that of the prompt's last token.
        let states =
            hidden.index_select(&rows.narrow(0, 1, ids.len())?, 0)?.to_dtype(DType::F64)?;
        let mut features = project(&states.mean(0)?.to_vec1::<f64>()?);
        features.push(logprobs.mean_all()?.to_scalar::<f64>()?);
        Ok(features)
    };
    texts.iter().map(own).collect()
}

/// Features of rated completions, by the indices of group and member.
pub(crate) type RatedFeatures = BTreeMap<(usize, usize), Vec<f64>>;

/// The features of the rated completions of those groups of a batch that `learns` selects. Texts with ids outside the vocabulary have
/// none: the step refuses them.
///
/// # Errors
/// If a tensor operation fails.
pub(crate) fn rated_features(
    base: &Model,
    batch: &TrainBatch,
    learns: impl Fn(&Group) -> bool,
) -> Result<RatedFeatures> {
    let is_known = |ids: &[u32]| ids.iter().all(|id| (*id as usize) < base.spec().vocab_size);
    let (mut places, mut texts) = (Vec::new(), Vec::new());
    for (index, group) in batch.groups.iter().enumerate() {
        if !learns(&group.group) || !is_known(&group.prompt_ids) {
            continue;
        }
        for (member, one) in group.members.iter().enumerate() {
            if !one.feedback.is_empty() && !one.sample.ids.is_empty() && is_known(&one.sample.ids) {
                places.push((index, member));
                texts.push((&group.prompt_ids[..], &one.sample.ids[..]));
            }
        }
    }
    Ok(places.into_iter().zip(features(base, &texts)?).collect())
}
