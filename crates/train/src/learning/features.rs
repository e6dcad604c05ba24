//! Features of prompts and completions, and of what clients rated in a batch: projections of the frozen base's final hidden
//! states.

use std::collections::BTreeMap;
use std::ops::Range;

use candle_core::{DType, Tensor};

use hone_model::Model;

use super::map_shards;
use crate::data::batch_builder::TrainBatch;
use crate::data::head::project;
use crate::data::packing::PackedBatch;
use crate::error::Result;
use crate::memory;

/// The features of one text.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct TextFeatures {
    /// Of the hidden state at the prompt's last token.
    pub prompt: Vec<f64>,
    /// Of the mean hidden state over the completion's tokens; empty of an empty completion.
    pub completion: Vec<f64>,
}

/// The features of prompts with their completions, which may be empty, by forward passes of the base. Tokens that
/// consecutive texts have in common are computed once.
///
/// # Errors
/// If a prompt is empty or an id is outside the vocabulary.
pub(crate) fn features(model: &Model, texts: &[(&[u32], &[u32])]) -> Result<Vec<TextFeatures>> {
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

fn of_shard(model: &Model, texts: &[(&[u32], &[u32])]) -> Result<Vec<TextFeatures>> {
    // A pass has no row of a text's last token, so that one token is added to each.
    let longer: Vec<Vec<u32>> = texts.iter().map(|(_, ids)| [ids, &[0][..]].concat()).collect();
    let completions = texts.iter().zip(&longer).map(|((prompt, _), ids)| (*prompt, &ids[..], 1.0));
    let layout = PackedBatch::new(&completions.collect::<Vec<_>>(), model.device())?;
    let hidden = model.hidden(&layout.ids, &layout.segments, None, None)?;
    let mut first = 0;
    let own = |(_, ids): &(&[u32], &[u32])| {
        let rows = layout.rows.narrow(0, first, ids.len() + 1)?;
        first += ids.len() + 1;
        // [tokens, hidden]: the prompt's last token, then the completion's.
        let states = hidden.index_select(&rows, 0)?.to_dtype(DType::F64)?;
        let values = |row: Tensor| Ok::<_, candle_core::Error>(project(&row.to_vec1::<f64>()?));
        let completion = match ids.len() {
            0 => Vec::new(),
            tokens => values(states.narrow(0, 1, tokens)?.mean(0)?)?,
        };
        Ok(TextFeatures { prompt: values(states.get(0)?)?, completion })
    };
    texts.iter().map(own).collect()
}

/// Features of the prompts and completions of a batch that clients rated.
#[derive(Clone, Debug, Default)]
pub(crate) struct RatedFeatures {
    /// Of each group's prompt, `[groups, features]`; empty without a rating.
    pub prompts: Vec<Vec<f64>>,
    /// Of rated completions, by the indices of group and member.
    pub completions: BTreeMap<(usize, usize), Vec<f64>>,
}

impl RatedFeatures {
    /// The features by one pass of the base over the rated groups' prompts, and over the rated completions of routes that
    /// `needs_completions` names. Texts with ids outside the vocabulary have no features: the step refuses them.
    ///
    /// # Errors
    /// If a tensor operation fails.
    pub fn of(
        base: &Model,
        batch: &TrainBatch,
        needs_completions: impl Fn(&str) -> bool,
    ) -> Result<Self> {
        let (mut places, mut texts) = (Vec::new(), Vec::new());
        for (index, group) in batch.groups.iter().enumerate() {
            let rated =
                group.members.iter().enumerate().filter(|(_, one)| !one.feedback.is_empty());
            let needs_completions = needs_completions(&group.group.route);
            let is_known =
                |ids: &[u32]| ids.iter().all(|id| (*id as usize) < base.spec().vocab_size);
            for (member, one) in rated.take(if needs_completions { usize::MAX } else { 1 }) {
                let ids = if needs_completions { &one.sample.ids[..] } else { &[] };
                if is_known(&group.prompt_ids) && is_known(ids) {
                    places.push((index, member));
                    texts.push((&group.prompt_ids[..], ids));
                }
            }
        }
        let mut all =
            Self { prompts: vec![Vec::new(); batch.groups.len()], completions: BTreeMap::new() };
        for (place, found) in places.into_iter().zip(features(base, &texts)?) {
            all.prompts[place.0] = found.prompt;
            if !found.completion.is_empty() {
                all.completions.insert(place, found.completion);
            }
        }
        Ok(all)
    }
}
