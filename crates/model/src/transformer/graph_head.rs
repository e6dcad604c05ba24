//! Log-probabilities and entropies from hidden states as candle graphs: for devices other than the CPU and
//! for bases that are trained, and the reference in tests.

use candle_core::{Result, Tensor, Var};

use super::head::{OutputLayer, chunk_rows};
use super::token_stats::TokenTargets;
use crate::kernels::ops;

/// [`head_stats`](super::head::head_stats) from candle's operations.
///
/// If x is differentiated, the gradients G of a chunk's statistics are computed with them, so that the logits
/// of one chunk are in memory at a time. With x0 the value of x, the result is `stats + (x - x0) G`.
pub(super) fn graph_stats(
    x: &Tensor,
    layer: OutputLayer,
    targets: &[u32],
    temperatures: &[f32],
) -> Result<Tensor> {
    let OutputLayer { weight, softcap, .. } = layer;
    let (n, vocab) = (x.dim(0)?, weight.dims2()?.0);
    let rows = TokenTargets::new(targets, temperatures, n, vocab)?.columns(x)?;
    // Widened once for all chunks.
    let weight = weight.to_float()?.to_dtype(x.dtype())?.detach();
    let (mut stats, mut gradients) = (Vec::new(), [Vec::new(), Vec::new()]);
    for first in (0..n).step_by(chunk_rows(vocab)) {
        let part = |rows: &Tensor| rows.narrow(0, first, chunk_rows(vocab).min(n - first));
        let (start, [targets, scales]) = (part(&x.detach())?, [part(&rows[0])?, part(&rows[1])?]);
        let start = if x.track_op() { Var::from_tensor(&start)?.into_inner() } else { start };
        let logits = ops::softcap(ops::linear(&start, &weight, None)?, softcap)?;
        let columns = token_stats(&logits, &targets, &scales)?;
        stats.push(Tensor::cat(&columns, 1)?.detach());
        if x.track_op() {
            for (column, gradients) in columns.iter().zip(&mut gradients) {
                gradients.extend(column.sum_all()?.backward()?.remove(&start));
            }
        }
    }
    let stats = Tensor::cat(&stats, 0)?;
    if !x.track_op() {
        return Ok(stats);
    }
    let change = (x - x.detach())?;
    let column = |gradients: &[Tensor]| (&change * Tensor::cat(gradients, 0)?)?.sum_keepdim(1);
    stats + Tensor::cat(&[column(&gradients[0])?, column(&gradients[1])?], 1)?
}

/// Log-probabilities and entropies, each `[n, 1]`, as in [`TokenTargets`]; `scales` are 1 / T.
fn token_stats(logits: &Tensor, targets: &Tensor, scales: &Tensor) -> Result<[Tensor; 2]> {
    let max = logits.max_keepdim(1)?.detach();
    let z = logits.broadcast_sub(&max)?.broadcast_mul(scales)?;
    let exp = z.exp()?;
    let sum = exp.sum_keepdim(1)?;
    let log_sum = sum.log()?;
    let mean = ((exp * &z)?.sum_keepdim(1)? / sum)?;
    Ok([(z.gather(targets, 1)? - &log_sum)?, (log_sum - mean)?])
}
