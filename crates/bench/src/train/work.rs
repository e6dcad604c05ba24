//! The floating-point operations of a step.

use std::collections::HashMap;

use hone_model::ModelSpec;
use hone_train::TrainSample;

/// The minimum operations of the matrix products of one step in GFLOP; a multiplication and an addition
/// are two. Counts each distinct prompt once, tokens that a later one attends to, and causal pairs only.
/// Recomputed layers and masked parts of attention tiles do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// The forward pass with the adapter.
    pub forward: f64,
    /// The forward pass of the reference.
    pub reference: f64,
    /// The backward pass: gradients of the inputs of frozen linears, of both adapter factors and of
    /// their inputs. The inputs of the first layer's attention need no gradient.
    pub backward: f64,
}

impl Work {
    /// The work of a step on `samples` with adapters of rank `r` on all linears.
    pub fn new(spec: &ModelSpec, samples: &[TrainSample], r: usize) -> Self {
        // The lengths of the completions by prompt.
        let mut groups: HashMap<&[u32], Vec<usize>> = HashMap::new();
        for sample in samples {
            groups.entry(&sample.prompt_ids).or_default().push(sample.ids.len());
        }
        let (mut tokens, mut rows) = (0, 0);
        // Pairs of attending tokens by layer, because windows may differ.
        let mut pairs = vec![0_usize; spec.num_layers];
        for (prompt, completions) in &groups {
            let prompt = prompt.len();
            tokens += prompt;
            for (layer, pairs) in pairs.iter_mut().enumerate() {
                let window = spec.attention_options(layer).window.unwrap_or(usize::MAX);
                let seen = |from: usize, to: usize| -> usize {
                    (from..to).map(|position| (position + 1).min(window)).sum()
                };
                *pairs += seen(0, prompt);
                *pairs += completions.iter().map(|n| seen(prompt, prompt + n - 1)).sum::<usize>();
            }
            tokens += completions.iter().map(|n| n - 1).sum::<usize>();
            rows += completions.iter().sum::<usize>();
        }
        let (mut frozen, mut adapter, mut first) = (0, 0, 0);
        for layer in 0..spec.num_layers {
            for (kind, (out, inner)) in spec.linears(layer) {
                frozen += out * inner;
                adapter += r * (out + inner);
                // Nothing is trained before the first layer's normalized input.
                if layer == 0 && kind.parent() == "self_attn" && kind.as_str() != "o_proj" {
                    first += out * inner + r * inner;
                }
            }
        }
        let head = spec.vocab_size * spec.hidden_size * rows;
        let attention = pairs.iter().sum::<usize>() * spec.num_heads * spec.head_dim;
        let gflop = |products: usize| 2.0 * products as f64 / 1e9;
        let base = frozen * tokens + head + 2 * attention;
        Self {
            forward: gflop(base + adapter * tokens),
            reference: gflop(base),
            backward: gflop((frozen + 2 * adapter - first) * tokens + head + 4 * attention),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_layer_is_counted_exactly() {
        let spec = ModelSpec::from_config(&serde_json::json!({
            "model_type": "qwen2", "vocab_size": 10, "hidden_size": 4, "intermediate_size": 6,
            "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        }))
        .unwrap();
        let sample = |ids: Vec<u32>| TrainSample {
            prompt_ids: vec![1, 2, 3],
            logprobs: vec![0.0; ids.len()],
            ids,
            masked: Vec::new(),
            temperature: 1.0,
            advantage: 1.0,
            version: 0,
            truncated: false,
            late: false,
            correction: false,
        };
        let work = Work::new(&spec, &[sample(vec![1, 2]), sample(vec![4])], 1);
        // Four tokens are computed: three of the prompt, and the first of the first completion.
        let frozen = 4 * 4 + 2 * (2 * 4) + 4 * 4 + 3 * (4 * 6);
        let adapter = (4 + 4) + 2 * (2 + 4) + (4 + 4) + 3 * (4 + 6);
        let (head, pairs) = (10 * 4 * 3, 1 + 2 + 3 + 4);
        let attention = pairs * 4;
        let gflop = |n: usize| 2.0 * n as f64 / 1e9;
        assert_eq!(work.reference, gflop(frozen * 4 + head + 2 * attention));
        assert_eq!(work.forward, gflop((frozen + adapter) * 4 + head + 2 * attention));
        let first = 4 * 4 + 2 * (2 * 4) + 3 * 4;
        let backward = (frozen + 2 * adapter - first) * 4 + head + 4 * attention;
        assert_eq!(work.backward, gflop(backward));
    }
}
