//! The KV cache: keys and values of sequences, in pages of 16 positions.
//!
//! Page `i` of a sequence holds the positions `16 i` to `16 i + 15`. Sequences that begin with the same
//! tokens share their full pages, which the prefix cache keeps after they have ended. A sequence that
//! continues within a page copies that page. A page stores its positions for every layer:
//! `[layer][kv head][keys [dim, PAGE] | values [PAGE, dim]]`. Keys are transposed, so that the scores
//! of 16 positions form one vector.
//!
//! Keys and values are floats of 32 bits, or, for quantized weights, integers of 16 bits: `[keys' scales [PAGE] |
//! keys | values' scales [PAGE] | values]`. The products with quantized weights round their inputs to integers of 16
//! bits too, so that the cache's rounding hardly adds to the difference from the trainer, and attention reads half
//! of the bytes.
//!
//! The keys and values of a position depend only on the weights and on the tokens up to it, bit by bit.
//! So it does not matter which sequence computed a page, in which batch, and whether by prefill or by
//! decoding.

mod page;
mod pool;
mod prefix_cache;
mod sequence;
mod slab;

pub(crate) use page::PAGE;
pub use page::{CacheShape, CacheType};
pub use pool::PagePool;
pub use prefix_cache::{CacheSpace, WeightsId};
pub(crate) use sequence::KvView;
pub use sequence::{BatchMember, SequencePages};
#[cfg(test)]
pub(crate) use slab::Page;

#[cfg(test)]
mod tests;
