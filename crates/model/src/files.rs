//! Tensors as files.

use std::collections::{BTreeMap, HashMap};

use candle_core::Tensor;

use crate::{ModelError, Result};

/// Tensors as the bytes of a safetensors file; equal tensors give equal bytes.
pub fn safetensors_bytes(tensors: &BTreeMap<String, Tensor>) -> Result<Vec<u8>> {
    // Python tools look for this entry.
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    safetensors::serialize(tensors, Some(metadata))
        .map_err(|e| ModelError::Tensor(candle_core::Error::wrap(e)))
}
