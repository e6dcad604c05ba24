//! Typed access to a file's metadata, with errors that name the file and the key.

use hone_core::gguf::{GgufFile, GgufValue};

use super::super::values::refuse;
use crate::error::EngineError;

/// The metadata of a file.
pub(super) struct Metadata<'a> {
    pub file: &'a GgufFile,
}

impl<'a> Metadata<'a> {
    pub fn new(file: &'a GgufFile) -> Self {
        Self { file }
    }

    fn get(&self, key: &str) -> Option<&'a GgufValue> {
        self.file.metadata().get(key)
    }

    /// An error that names the file.
    pub fn refuse(&self, reason: &str) -> EngineError {
        refuse(format!("{}: {reason}", self.file.path().display()))
    }

    fn wrong(&self, key: &str, expected: &str) -> EngineError {
        self.refuse(&format!("{key} is not {expected}"))
    }

    fn missing(&self, key: &str) -> EngineError {
        self.refuse(&format!("there is no {key} in the file"))
    }

    /// A whole number from 0 on.
    pub fn whole(&self, key: &str) -> Result<Option<u64>, EngineError> {
        match self.get(key) {
            None => Ok(None),
            Some(GgufValue::Integer(number)) if *number >= 0 => Ok(Some(number.unsigned_abs())),
            Some(_) => Err(self.wrong(key, "a whole number")),
        }
    }

    pub fn required_whole(&self, key: &str) -> Result<u64, EngineError> {
        self.whole(key)?.ok_or_else(|| self.missing(key))
    }

    /// A number.
    pub fn number(&self, key: &str) -> Result<Option<f64>, EngineError> {
        match self.get(key) {
            None => Ok(None),
            Some(GgufValue::Float(number)) => Ok(Some(decimal(*number as f32))),
            Some(GgufValue::Integer(number)) => Ok(Some(*number as f64)),
            Some(_) => Err(self.wrong(key, "a number")),
        }
    }

    pub fn required_number(&self, key: &str) -> Result<f64, EngineError> {
        self.number(key)?.ok_or_else(|| self.missing(key))
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>, EngineError> {
        match self.get(key) {
            None => Ok(None),
            Some(GgufValue::Bool(flag)) => Ok(Some(*flag)),
            Some(_) => Err(self.wrong(key, "true or false")),
        }
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>, EngineError> {
        match self.get(key) {
            None => Ok(None),
            Some(GgufValue::Text(text)) => Ok(Some(text)),
            Some(_) => Err(self.wrong(key, "a text")),
        }
    }

    pub fn required_text(&self, key: &str) -> Result<&'a str, EngineError> {
        self.text(key)?.ok_or_else(|| self.missing(key))
    }

    /// A list whose members `read` accepts.
    pub fn list<T>(
        &self,
        key: &str,
        read: impl Fn(&'a GgufValue) -> Option<T>,
    ) -> Result<Option<Vec<T>>, EngineError> {
        match self.get(key) {
            None => Ok(None),
            Some(GgufValue::List(list)) => {
                let list: Option<Vec<T>> = list.iter().map(read).collect();
                list.map(Some).ok_or_else(|| self.wrong(key, "a list of values of its type"))
            }
            Some(_) => Err(self.wrong(key, "a list")),
        }
    }

    pub fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>, EngineError> {
        self.list(key, |value| match value {
            GgufValue::Text(text) => Some(text.as_str()),
            _ => None,
        })
    }

    pub fn required_texts(&self, key: &str) -> Result<Vec<&'a str>, EngineError> {
        self.texts(key)?.ok_or_else(|| self.missing(key))
    }

    /// The values of a vector of f32.
    pub fn vector(&self, name: &str) -> Result<Option<Vec<f32>>, EngineError> {
        let Some(tensor) = self.file.tensors().get(name) else { return Ok(None) };
        if tensor.dtype() != Ok(hone_core::gguf::GgufType::F32) {
            return Err(self.wrong(name, "of type F32"));
        }
        let bytes = self.file.read(name, tensor)?;
        let (values, _) = bytes.as_chunks::<4>();
        Ok(Some(values.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()))
    }

    pub fn has_tensor(&self, name: &str) -> bool {
        self.file.tensors().contains_key(name)
    }
}

/// The number that an f32 was written for: the shortest decimal that rounds to it, 1e-6 instead of
/// 9.999999974752427e-7.
pub(super) fn decimal(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| value.into())
}
