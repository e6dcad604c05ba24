//! Reads GGUF files: the model files of llama.cpp, with metadata, tokenizer and quantized tensors.
//!
//! The format is that of ggml's `docs/gguf.md`, in versions 2 and 3, little-endian. Only the header is
//! read when a file is opened.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Error, ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use candle_core::DType;

use hone_core::files::at;

use crate::weights::{BlockFormat, WeightType};
use crate::{ModelError, Result};

/// Entries that are allocated before the file has shown that it holds them.
const TRUSTED: usize = 1 << 12;

/// Alignment of the tensors if `general.alignment` is absent, in bytes.
const ALIGNMENT: u64 = 32;

/// ggml's numbers of the types that Hone reads.
const TYPES: [(u32, WeightType); 8] = [
    (0, WeightType::Float(DType::F32)),
    (1, WeightType::Float(DType::F16)),
    (2, WeightType::Blocks(BlockFormat::Q4_0)),
    (3, WeightType::Blocks(BlockFormat::Q4_1)),
    (8, WeightType::Blocks(BlockFormat::Q8_0)),
    (12, WeightType::Blocks(BlockFormat::Q4K)),
    (14, WeightType::Blocks(BlockFormat::Q6K)),
    (30, WeightType::Float(DType::BF16)),
];

/// Names of other types of ggml by number, for errors.
const OTHER_TYPES: [(u32, &str); 21] = [
    (6, "Q5_0"),
    (7, "Q5_1"),
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (13, "Q5_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (26, "I32"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
];

/// A tensor in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensor {
    /// The dimensions, outermost first: `[rows, columns]` of a matrix.
    pub shape: Vec<usize>,
    /// ggml's number of the type.
    kind: u32,
    /// Position in the file's data.
    offset: u64,
}

impl GgufTensor {
    /// The type, or the name of one that Hone does not read.
    pub fn dtype(&self) -> std::result::Result<WeightType, String> {
        let known = TYPES.iter().find(|(kind, _)| *kind == self.kind);
        known.map(|(_, dtype)| *dtype).ok_or_else(|| {
            let other = OTHER_TYPES.iter().find(|(kind, _)| *kind == self.kind);
            other.map_or_else(|| format!("number {}", self.kind), |(_, name)| (*name).to_owned())
        })
    }
}

/// A value of a file's metadata. Numbers of any width are widened.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufValue {
    Integer(i64),
    Float(f64),
    Bool(bool),
    /// A text. Bytes that are not UTF-8 become U+FFFD.
    Text(String),
    List(Vec<GgufValue>),
}

impl GgufValue {
    pub fn as_text(&self) -> Option<&str> {
        if let Self::Text(text) = self { Some(text) } else { None }
    }
}

/// The number that an f32 was written for: the shortest decimal that rounds to it, 1e-6 instead of
/// 9.999999974752427e-7.
pub(crate) fn decimal(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| value.into())
}

pub(crate) fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

/// A file's metadata and tensors.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    file: File,
    metadata: BTreeMap<String, GgufValue>,
    tensors: BTreeMap<String, GgufTensor>,
    /// Where the tensors' data start.
    data: u64,
}

impl GgufFile {
    /// Reads the header of a file.
    pub fn open(path: &Path) -> Result<Self> {
        Ok(Self::read_header(path).map_err(at(path))?)
    }

    fn read_header(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let mut reader = HeaderReader { left: file.metadata()?.len(), from: BufReader::new(file) };
        if &reader.bytes::<4>()? != b"GGUF" {
            return Err(damaged("it is not a GGUF file"));
        }
        let version = reader.u32()?;
        if !(2..=3).contains(&version) {
            return Err(damaged(format!("GGUF version {version} is not one of 2 and 3")));
        }
        let (tensor_count, entries) = (reader.u64()?, reader.u64()?);
        let mut metadata = BTreeMap::new();
        for _ in 0..entries {
            let key = reader.text()?;
            let kind = reader.u32()?;
            metadata.insert(key, reader.value(kind, 0)?);
        }
        let mut tensors = BTreeMap::new();
        for _ in 0..tensor_count {
            let (name, tensor) = (reader.text()?, reader.tensor()?);
            tensors.insert(name, tensor);
        }
        let alignment = match metadata.get("general.alignment") {
            Some(GgufValue::Integer(bytes)) => u64::try_from(*bytes).unwrap_or(0),
            _ => ALIGNMENT,
        };
        if !alignment.is_power_of_two() {
            return Err(damaged(format!("general.alignment {alignment} is not a power of two")));
        }
        let mut from = reader.from;
        let data = from.stream_position()?.next_multiple_of(alignment);
        Ok(Self { path: path.to_owned(), file: from.into_inner(), metadata, tensors, data })
    }

    pub fn tensors(&self) -> &BTreeMap<String, GgufTensor> {
        &self.tensors
    }

    /// An error that names the file.
    pub fn refuse(&self, reason: &str) -> ModelError {
        ModelError::Unsupported(format!("{}: {reason}", self.path.display()))
    }

    /// The value of a key that `read` accepts; `None` without the key. `expected` is for errors.
    fn get<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        read: impl FnOnce(&'a GgufValue) -> Option<T>,
    ) -> Result<Option<T>> {
        let wrong = || self.refuse(&format!("{key} is not {expected}"));
        self.metadata.get(key).map(|value| read(value).ok_or_else(wrong)).transpose()
    }

    /// The value that one of the methods below reads, which must be there.
    pub fn required<'a, T>(
        &'a self,
        key: &str,
        read: impl FnOnce(&'a Self, &str) -> Result<Option<T>>,
    ) -> Result<T> {
        read(self, key)?.ok_or_else(|| self.refuse(&format!("there is no {key} in the file")))
    }

    /// A whole number from 0 on.
    pub fn whole(&self, key: &str) -> Result<Option<u64>> {
        self.get(key, "a whole number", |value| match value {
            GgufValue::Integer(number) => u64::try_from(*number).ok(),
            _ => None,
        })
    }

    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        self.get(key, "a number", |value| match value {
            GgufValue::Float(number) => Some(decimal(*number as f32)),
            GgufValue::Integer(number) => Some(*number as f64),
            _ => None,
        })
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.get(key, "true or false", |value| match value {
            GgufValue::Bool(flag) => Some(*flag),
            _ => None,
        })
    }

    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        self.get(key, "a text", GgufValue::as_text)
    }

    /// A list whose members `read` accepts.
    pub fn list<'a, T>(
        &'a self,
        key: &str,
        read: impl Fn(&'a GgufValue) -> Option<T>,
    ) -> Result<Option<Vec<T>>> {
        self.get(key, "a list of values of its type", |value| match value {
            GgufValue::List(list) => list.iter().map(read).collect(),
            _ => None,
        })
    }

    pub fn texts(&self, key: &str) -> Result<Option<Vec<&str>>> {
        self.list(key, GgufValue::as_text)
    }

    /// The values of a tensor that is a vector of f32.
    pub fn vector(&self, name: &str) -> Result<Option<Vec<f32>>> {
        let Some(tensor) = self.tensors.get(name) else { return Ok(None) };
        if tensor.dtype() != Ok(WeightType::Float(DType::F32)) {
            return Err(self.refuse(&format!("{name} is not of type F32")));
        }
        let bytes = self.read(name, tensor)?;
        let (values, _) = bytes.as_chunks::<4>();
        Ok(Some(values.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()))
    }

    /// Reads the bytes of a tensor whose type Hone reads. `name` is for errors.
    pub fn read(&self, name: &str, tensor: &GgufTensor) -> Result<Vec<u8>> {
        let read = || {
            let size =
                tensor_bytes(tensor).map_err(|reason| damaged(format!("{name}: {reason}")))?;
            let start = self.data.saturating_add(tensor.offset);
            let end = start.saturating_add(size as u64);
            if end > self.file.metadata()?.len() {
                return Err(damaged(format!("{name} ends after the file, which is cut off")));
            }
            let mut bytes = vec![0; size];
            let mut file = &self.file;
            file.seek(SeekFrom::Start(start))?;
            file.read_exact(&mut bytes)?;
            Ok(bytes)
        };
        Ok(read().map_err(at(&self.path))?)
    }
}

fn tensor_bytes(tensor: &GgufTensor) -> std::result::Result<usize, String> {
    let dtype = tensor.dtype().map_err(|name| format!("type {name} cannot be read"))?;
    let columns = tensor.shape.last().copied().unwrap_or(1);
    if let WeightType::Blocks(format) = dtype
        && !columns.is_multiple_of(format.values())
    {
        return Err(format!("rows of {columns} values are not blocks of {}", format.values()));
    }
    let count = tensor.shape.iter().try_fold(1_usize, |count, n| count.checked_mul(*n));
    // No type takes more than 4 bytes a value.
    let count = count.filter(|count| count.checked_mul(4).is_some());
    count.map(|count| dtype.size(count)).ok_or_else(|| "it is too large".to_owned())
}

fn damaged(reason: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidData, reason.into())
}

struct HeaderReader {
    from: BufReader<File>,
    /// Bytes to the end of the file.
    left: u64,
}

impl HeaderReader {
    fn bytes<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.from.read_exact(&mut bytes)?;
        self.left = self.left.saturating_sub(N as u64);
        Ok(bytes)
    }

    fn u32(&mut self) -> io::Result<u32> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> io::Result<u64> {
        self.bytes().map(u64::from_le_bytes)
    }

    /// A number of things that take at least a byte each.
    fn count(&mut self) -> io::Result<usize> {
        let count = self.u64()?;
        let fits = usize::try_from(count).ok().filter(|_| count <= self.left);
        fits.ok_or_else(|| damaged(format!("{count} entries are announced after the file's end")))
    }

    fn text(&mut self) -> io::Result<String> {
        let count = self.count()?;
        let mut bytes = vec![0; count];
        self.from.read_exact(&mut bytes)?;
        self.left -= count as u64;
        Ok(String::from_utf8(bytes)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
    }

    fn value(&mut self, kind: u32, depth: usize) -> io::Result<GgufValue> {
        use GgufValue::{Bool, Float, Integer, List, Text};
        Ok(match kind {
            0 => Integer(i64::from(u8::from_le_bytes(self.bytes()?))),
            1 => Integer(i64::from(i8::from_le_bytes(self.bytes()?))),
            2 => Integer(i64::from(u16::from_le_bytes(self.bytes()?))),
            3 => Integer(i64::from(i16::from_le_bytes(self.bytes()?))),
            4 => Integer(i64::from(self.u32()?)),
            5 => Integer(i64::from(i32::from_le_bytes(self.bytes()?))),
            6 => Float(f64::from(f32::from_le_bytes(self.bytes()?))),
            7 => Bool(self.bytes::<1>()? != [0]),
            8 => Text(self.text()?),
            9 if depth < 4 => {
                let (kind, count) = (self.u32()?, self.count()?);
                let mut list = Vec::with_capacity(count.min(TRUSTED));
                for _ in 0..count {
                    list.push(self.value(kind, depth + 1)?);
                }
                List(list)
            }
            10 => {
                Integer(i64::try_from(self.u64()?).map_err(|_| damaged("a number is too large"))?)
            }
            11 => Integer(i64::from_le_bytes(self.bytes()?)),
            12 => Float(f64::from_le_bytes(self.bytes()?)),
            kind => return Err(damaged(format!("its metadata have a value of type {kind}"))),
        })
    }

    fn tensor(&mut self) -> io::Result<GgufTensor> {
        let rank = self.u32()?;
        if rank > 4 {
            return Err(damaged(format!("a tensor has {rank} dimensions")));
        }
        let mut shape = Vec::new();
        for _ in 0..rank {
            let size = usize::try_from(self.u64()?);
            shape.push(size.map_err(|_| damaged("a dimension is too large"))?);
        }
        shape.reverse();
        Ok(GgufTensor { shape, kind: self.u32()?, offset: self.u64()? })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn text(bytes: &mut Vec<u8>, text: &str) {
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.as_bytes());
    }

    /// A file with one tensor `[2, 32]` of a type.
    fn file(kind: u32) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(3_u32.to_le_bytes());
        bytes.extend([1_u64, 3].map(u64::to_le_bytes).concat());
        text(&mut bytes, "a.name");
        bytes.extend(8_u32.to_le_bytes());
        text(&mut bytes, "tiny");
        text(&mut bytes, "a.list");
        bytes.extend([9_u32, 5].map(u32::to_le_bytes).concat());
        bytes.extend(2_u64.to_le_bytes());
        bytes.extend([-1_i32, 7].map(i32::to_le_bytes).concat());
        text(&mut bytes, "a.float");
        bytes.extend(6_u32.to_le_bytes());
        bytes.extend(0.5_f32.to_le_bytes());
        text(&mut bytes, "w");
        bytes.extend(2_u32.to_le_bytes());
        bytes.extend([32_u64, 2].map(u64::to_le_bytes).concat());
        bytes.extend(kind.to_le_bytes());
        bytes.extend(0_u64.to_le_bytes());
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend((0..68).collect::<Vec<u8>>());
        bytes
    }

    fn opened(bytes: &[u8]) -> (tempfile::TempDir, Result<GgufFile>) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.gguf");
        fs::write(&path, bytes).unwrap();
        let file = GgufFile::open(&path);
        (dir, file)
    }

    #[test]
    fn reads_metadata_and_tensors() {
        let (_dir, file) = opened(&file(8));
        let file = file.unwrap();
        assert_eq!(file.metadata["a.name"], GgufValue::Text("tiny".to_owned()));
        let list = [-1, 7].map(GgufValue::Integer).to_vec();
        assert_eq!(file.metadata["a.list"], GgufValue::List(list));
        assert_eq!(file.metadata["a.float"], GgufValue::Float(0.5));
        let tensor = &file.tensors()["w"];
        assert_eq!(
            (tensor.shape.as_slice(), tensor.dtype()),
            (&[2, 32][..], Ok(WeightType::Blocks(BlockFormat::Q8_0)))
        );
        assert_eq!(file.read("w", tensor).unwrap(), (0..68).collect::<Vec<u8>>());
    }

    #[test]
    fn a_damaged_file_is_an_error() {
        let whole = file(8);
        for len in [0, 3, 10, 40, 100, 150] {
            assert!(opened(&whole[..len]).1.is_err(), "{len} bytes");
        }
        let (_dir, cut) = opened(&whole[..whole.len() - 1]);
        let cut = cut.unwrap();
        let error = cut.read("w", &cut.tensors()["w"]).unwrap_err().to_string();
        assert!(error.ends_with("w ends after the file, which is cut off"), "{error}");
        let mut version = whole.clone();
        version[4] = 1;
        assert!(opened(&version).1.unwrap_err().to_string().contains("GGUF version 1"));
        // A length that no file has must not be allocated.
        let mut long = whole;
        long[24..32].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(opened(&long).1.unwrap_err().to_string().contains("after the file's end"));
    }
}
