//! A pass on a device over sequences that decode and parts of prompts.

use hone_cuda::RowDraw;
use hone_engine::EngineError;

use super::pass::{EngineSequence, PromptPart};
use crate::decoder::PassOutcome;
use crate::device::{DeviceDecoder, DevicePart};
use crate::error::Result;
use crate::kv_cache::WeightsId;

/// Decodes and samples one token of each row, and computes parts of prompts, once the copies of pages are made. There is
/// one pass, unless more adapters take part than the device has slots.
pub(super) fn compute_on_device(
    device: &mut DeviceDecoder,
    copies: &[[u32; 2]],
    rows: Vec<&mut EngineSequence>,
    parts: &mut [PromptPart],
) {
    let mut rows = rows;
    let mut parts: Vec<&mut PromptPart> = parts.iter_mut().collect();
    if let Err(error) = device.copy_pages(copies) {
        return fail(&mut rows, &mut parts, &error.to_string());
    }
    // Parts of one adapter in turn have their products together.
    parts.sort_by_key(|part| part.sequence.policy.id);
    let all = rows.iter().map(|row| &**row).chain(parts.iter().map(|part| &part.sequence));
    let adapted = all.filter(|sequence| sequence.policy.adapter.is_some());
    let mut ids: Vec<WeightsId> = adapted.map(|sequence| sequence.policy.id).collect();
    ids.sort_unstable();
    ids.dedup();
    while !(rows.is_empty() && parts.is_empty()) {
        let now: Vec<WeightsId> = ids.drain(..ids.len().min(device.adapters())).collect();
        let takes_part = |sequence: &EngineSequence| {
            sequence.policy.adapter.is_none() || now.contains(&sequence.policy.id)
        };
        let (mut own, others) = rows.into_iter().partition(|row| takes_part(row));
        rows = others;
        let (mut prompts, others) = parts.into_iter().partition(|part| takes_part(&part.sequence));
        parts = others;
        if let Err(error) = compute(device, &mut own, &mut prompts) {
            fail(&mut own, &mut prompts, &error.to_string());
        }
    }
}

fn fail(rows: &mut [&mut EngineSequence], parts: &mut [&mut PromptPart], error: &str) {
    tracing::error!(%error, "a pass failed");
    let error = EngineError::Internal(error.to_owned());
    parts.iter_mut().for_each(|part| part.sequence.fail(error.clone()));
    rows.iter_mut().for_each(|sequence| sequence.fail(error.clone()));
}

fn compute(
    device: &mut DeviceDecoder,
    rows: &mut [&mut EngineSequence],
    parts: &mut [&mut PromptPart],
) -> Result<()> {
    fn part(sequence: &EngineSequence, tokens: usize) -> DevicePart<'_> {
        let EngineSequence { pages, policy, .. } = sequence;
        DevicePart { pages, tokens, weights: policy.id, adapter: policy.adapter.as_deref() }
    }
    let decoding: Vec<_> = rows.iter().map(|sequence| part(sequence, 1)).collect();
    let prompts: Vec<_> = parts.iter().map(|p| part(&p.sequence, p.tokens)).collect();
    device.compute(&decoding, &prompts)?;
    for PromptPart { sequence, tokens, outcome } in parts.iter_mut().map(|part| &mut **part) {
        sequence.pages.advance(*tokens);
        *outcome = PassOutcome::Computed;
    }
    let mut draws = Vec::new();
    for (row, sequence) in rows.iter_mut().enumerate() {
        sequence.pages.advance(1);
        if sequence.run.is_over() {
            sequence.finished = true;
        } else if let Some(draw) = sequence.sampler.plain_draw(device.vocab()) {
            let (temperature, uniform) = (draw.temperature, draw.uniform);
            draws.push(RowDraw { row, temperature, uniform });
        }
    }
    let mut sampled = vec![None; rows.len()];
    for (draw, sample) in draws.iter().zip(device.sample(&draws)?) {
        sampled[draw.row] = sample;
    }
    let mut logits = Vec::new();
    for (row, sequence) in rows.iter_mut().enumerate().filter(|(_, row)| !row.finished) {
        match sampled[row] {
            Some(sample) => {
                let token = sequence.sampler.accept(sample.id, sample.logprob);
                sequence.push(token);
            }
            // It depends on more than the temperature, or the host finds what is wrong with the logits.
            None => {
                device.logits(row, &mut logits)?;
                sequence.sample(&logits);
            }
        }
    }
    Ok(())
}
