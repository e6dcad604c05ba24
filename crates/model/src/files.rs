//! Tensors in files.

use std::collections::{BTreeMap, HashMap};

use candle_core::Tensor;

use crate::{ModelError, Result};

/// The bytes of a safetensors file. Equal tensors have equal bytes.
///
/// # Errors
/// If a tensor cannot be read.
pub fn safetensors_bytes(tensors: &BTreeMap<String, Tensor>) -> Result<Vec<u8>> {
    // transformers and PEFT require this entry.
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    safetensors::serialize(tensors, Some(metadata))
        .map_err(|e| ModelError::Tensor(candle_core::Error::wrap(e)))
}
