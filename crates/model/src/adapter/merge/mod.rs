//! Merges an adapter into its base: every adapted weight becomes `W + scale * B A`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::fs::{self, File};
use std::io::{BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device, Tensor};
use safetensors::tensor::{TensorView, View};
use serde_json::{Map, Value, json};

use hone_core::files::{at, replace_dir};

use super::module_matching::ModuleMatcher;
use super::peft;
use super::weights::{factor_names, module_of};
use crate::gguf::is_gguf;
use crate::model_dir::weight_files;
use crate::{ModelError, Result};

const CONFIG: &str = "config.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Extensions of files that are not copied: they hold unmerged weights, or caches.
const WEIGHTS: [&str; 11] = [
    "safetensors",
    "bin",
    "pt",
    "pth",
    "ckpt",
    "h5",
    "msgpack",
    "onnx",
    "onnx_data",
    "gguf",
    "tflite",
];

/// The types of merged weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// Each weight in its type in the base; sums are computed in f32 and rounded once.
    #[default]
    Base,
    /// All floats in f32.
    F32,
}

/// The result of a merge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Merged {
    /// Weights that the adapter changed.
    pub modules: usize,
    /// All tensors.
    pub tensors: usize,
    /// Bytes of all tensors.
    pub bytes: u64,
}

/// One module's adapter, which adds `scale * B A` to its weight.
pub struct LoraDelta {
    /// `[r, in]` in f32.
    pub a: Tensor,
    /// `[out, r]` in f32.
    pub b: Tensor,
    /// The scale.
    pub scale: f64,
}

/// Writes a model directory that transformers loads without PEFT: the base's weights with an adapter
/// merged in, shard by shard under the base's file names, and copies of all other files. A tied
/// output layer stays tied. After an error or a crash, `target` does not exist.
///
/// `base` holds `config.json` and `model.safetensors`, or shards with their index; `adapter` is a PEFT
/// directory for it. Memory holds the adapter and one tensor of the base at a time.
///
/// # Errors
/// If `target` exists, a file is missing or damaged, the base is quantized or a GGUF file, the adapter uses an
/// unsupported option or is on a weight that the base does not have, or a merged value is not finite in
/// its type.
pub fn merge(base: &Path, adapter: &Path, target: &Path, precision: Precision) -> Result<Merged> {
    check_absent(target)?;
    if is_gguf(base) || (!base.join(CONFIG).exists() && holds_gguf(base)) {
        let reason = "is a GGUF file: merge into the safetensors model that it was made from";
        return Err(ModelError::model(base, reason));
    }
    let config = config(base, precision)?;
    let deltas = deltas(adapter)?;
    let name = |path: &PathBuf| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let shards: Vec<String> = weight_files(base)?.iter().map(name).collect();
    let mut merged = Merged::default();
    replace_dir(target, |out| {
        merged = write(base, adapter, out, (&config, &shards), &deltas, precision)?;
        check_absent(target)
    })?;
    Ok(merged)
}

fn holds_gguf(dir: &Path) -> bool {
    let mut files = fs::read_dir(dir).into_iter().flatten().flatten();
    files.any(|file| is_gguf(&file.path()))
}

fn check_absent(target: &Path) -> Result<()> {
    match fs::symlink_metadata(target) {
        Ok(_) => Err(at(target)(ErrorKind::AlreadyExists.into()).into()),
        Err(_) => Ok(()),
    }
}

fn write(
    base: &Path,
    adapter: &Path,
    out: &Path,
    (config, shards): (&[u8], &[String]),
    deltas: &BTreeMap<String, LoraDelta>,
    precision: Precision,
) -> Result<Merged> {
    let mut missing: BTreeSet<&str> = deltas.keys().map(String::as_str).collect();
    let mut weight_map = BTreeMap::new();
    let mut merged = Merged { modules: deltas.len(), tensors: 0, bytes: 0 };
    for shard in shards {
        let path = base.join(shard);
        // SAFETY: the mapping is read and dropped within this block. If the file changes meanwhile, the
        // values can be wrong, as with any other read of it.
        let file = unsafe { MmapedSafetensors::new(&path) }.map_err(|e| damaged(base, shard, e))?;
        let entries = layout(&file.tensors(), precision);
        let out = out.join(shard);
        let mut writer = BufWriter::new(File::create(&out).map_err(at(&out))?);
        writer.write_all(&header(&entries)?).map_err(at(&out))?;
        for entry in &entries {
            let module = entry.name.strip_suffix(".weight").unwrap_or_default();
            let bytes = match deltas.get(module) {
                None if !entry.converted => {
                    let view = file.get(&entry.name).map_err(|e| damaged(base, shard, e))?;
                    view.data().to_vec()
                }
                delta => {
                    let weight = file.load(&entry.name, &Device::Cpu)?;
                    View::data(&&merged_weight(entry, weight, delta, base)?).into_owned()
                }
            };
            writer.write_all(&bytes).map_err(at(&out))?;
            missing.remove(module);
            merged.tensors += 1;
            merged.bytes += bytes.len() as u64;
            weight_map.insert(entry.name.clone(), shard.clone());
        }
        writer.flush().map_err(at(&out))?;
    }
    if let Some(name) = missing.first() {
        let reason =
            format!("it changes `{name}.weight`, which the base in {} lacks", base.display());
        return Err(ModelError::adapter(adapter, reason));
    }
    copy_others(base, out)?;
    let write = |name: &str, bytes: &[u8]| {
        let path = out.join(name);
        fs::write(&path, bytes).map_err(at(&path))
    };
    write(CONFIG, config)?;
    if shards != [SINGLE] {
        write(INDEX, &index(base, weight_map, merged.bytes)?)?;
    }
    Ok(merged)
}

/// One tensor of a file to be written.
struct TensorEntry {
    name: String,
    /// The type in the file.
    dtype: safetensors::Dtype,
    /// Whether the type in the base differs.
    converted: bool,
    shape: Vec<usize>,
    bytes: usize,
}

/// The tensors in the order they are written: widest types first, which keeps all of them aligned.
fn layout(tensors: &[(String, TensorView<'_>)], precision: Precision) -> Vec<TensorEntry> {
    use safetensors::Dtype::{BF16, F16, F32, F64};

    let entry = |(name, view): &(String, TensorView<'_>)| {
        let converted = precision == Precision::F32 && matches!(view.dtype(), F16 | BF16 | F64);
        let dtype = if converted { F32 } else { view.dtype() };
        let bytes = view.data().len() * dtype.bitsize() / view.dtype().bitsize();
        TensorEntry { name: name.clone(), dtype, converted, shape: view.shape().to_vec(), bytes }
    };
    let mut entries: Vec<TensorEntry> = tensors.iter().map(entry).collect();
    entries.sort_by(|a, b| (b.dtype.bitsize(), &a.name).cmp(&(a.dtype.bitsize(), &b.name)));
    entries
}

/// The beginning of a safetensors file: the length of the JSON and the JSON.
fn header(entries: &[TensorEntry]) -> Result<Vec<u8>> {
    let mut map = Map::from_iter([("__metadata__".to_owned(), json!({"format": "pt"}))]);
    let mut start = 0;
    for TensorEntry { name, dtype, shape, bytes, .. } in entries {
        let end = start + bytes;
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]});
        map.insert(name.clone(), entry);
        start = end;
    }
    let mut text = serde_json::to_vec(&map).map_err(candle_core::Error::wrap)?;
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.extend(text);
    Ok(header)
}

/// `weight + scale B A` in f32, converted to the type it is stored in.
fn merged_weight(
    entry: &TensorEntry,
    weight: Tensor,
    delta: Option<&LoraDelta>,
    base: &Path,
) -> Result<Tensor> {
    let dtype = if entry.converted { DType::F32 } else { weight.dtype() };
    let Some(LoraDelta { a, b, scale }) = delta else { return Ok(weight.to_dtype(dtype)?) };
    let wrong = |reason: String| Err(ModelError::model(base, format!("`{}` {reason}", entry.name)));
    if !matches!(weight.dtype(), DType::F64 | DType::F32 | DType::F16 | DType::BF16) {
        return wrong(format!("is of type {:?}, not a float", weight.dtype()));
    }
    let shape = [b.dims()[0], a.dims()[1]];
    if weight.dims() != shape {
        return wrong(format!("is {:?}, but the adapter {shape:?}", weight.dims()));
    }
    let change = (b.matmul(a)? * *scale)?;
    let sum = (weight.to_dtype(DType::F32)? + change)?.to_dtype(dtype)?;
    let values = sum.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    if !values.iter().all(|x| x.is_finite()) {
        return wrong(format!("is not finite once merged in {dtype:?}; try f32"));
    }
    Ok(sum)
}

/// `config.json` of the merged model, which names the type of the weights.
fn config(base: &Path, precision: Precision) -> Result<Vec<u8>> {
    let path = base.join(CONFIG);
    let text = fs::read(&path).map_err(at(&path))?;
    let mut value: Value = serde_json::from_slice(&text).map_err(|e| damaged(base, CONFIG, e))?;
    if !value["quantization_config"].is_null() {
        let reason = "has a `quantization_config`: merge into the unquantized model";
        return Err(ModelError::model(base, format!("{CONFIG} {reason}")));
    }
    if precision == Precision::Base {
        return Ok(text);
    }
    let fields = value
        .as_object_mut()
        .ok_or_else(|| ModelError::model(base, format!("{CONFIG} is not a JSON object")))?;
    // transformers 5 writes `dtype`, and reads either.
    let key = if fields.contains_key("torch_dtype") { "torch_dtype" } else { "dtype" };
    fields.insert(key.to_owned(), json!("float32"));
    Ok(format!("{value:#}\n").into_bytes())
}

/// A PEFT directory's adapter by the names of its modules, of which each has both its tensors.
///
/// # Errors
/// If a file is missing or damaged, or the adapter uses an option with which it is not `W + scale * B A`.
pub fn deltas(dir: &Path) -> Result<BTreeMap<String, LoraDelta>> {
    let wrong = |reason: String| ModelError::adapter(dir, reason);
    let config = peft::read_config(dir)?;
    let matcher =
        ModuleMatcher::new(&config).map_err(|(key, why)| wrong(format!("`{key}`: {why}")))?;
    let mut tensors = peft::read_tensors(dir, &Device::Cpu)?;
    let modules: BTreeSet<String> = tensors
        .keys()
        .map(|name| {
            let other = || wrong(format!("`{name}` is not the name of a LoRA tensor"));
            Ok(module_of(name).ok_or_else(other)?.to_owned())
        })
        .collect::<Result<_>>()?;
    let mut deltas = BTreeMap::new();
    for module in modules {
        let mut take = |name: String| -> Result<Tensor> {
            let missing = || wrong(format!("`{name}` is missing"));
            Ok(tensors.remove(&name).ok_or_else(missing)?.to_dtype(DType::F32)?)
        };
        let [a, b] = factor_names(&module);
        let (a, b) = (take(a)?, take(b)?);
        let Some(expected) = matcher.matched(&module) else {
            return Err(wrong(format!("it has tensors on {module}, which its settings exclude")));
        };
        let r = expected.r;
        if a.rank() != 2 || b.rank() != 2 || a.dims()[0] != r || b.dims()[1] != r {
            let shapes = format!("{:?} and {:?}", a.dims(), b.dims());
            return Err(wrong(format!("{module} has {shapes} for rank {r}")));
        }
        deltas.insert(module, LoraDelta { a, b, scale: expected.scale });
    }
    if deltas.is_empty() {
        return Err(wrong("it contains no tensors".to_owned()));
    }
    Ok(deltas)
}

/// The base's index with the tensors and the size of the merged model.
fn index(base: &Path, weight_map: BTreeMap<String, String>, bytes: u64) -> Result<Vec<u8>> {
    let path = base.join(INDEX);
    let text = fs::read(&path).map_err(at(&path))?;
    let mut value: Value = serde_json::from_slice(&text).map_err(|e| damaged(base, INDEX, e))?;
    value["metadata"]["total_size"] = bytes.into();
    value["weight_map"] = json!(weight_map);
    Ok(format!("{value:#}\n").into_bytes())
}

/// Copies all files and directories except weights, indices and hidden ones.
fn copy_others(from: &Path, to: &Path) -> Result<()> {
    for entry in fs::read_dir(from).map_err(at(from))? {
        let path = entry.map_err(at(from))?.path();
        let name = path.file_name().unwrap_or_default();
        let extension = path.extension().and_then(|e| e.to_str()).unwrap_or("").to_lowercase();
        let text = name.to_string_lossy();
        if text.starts_with('.')
            || text.ends_with(".index.json")
            || WEIGHTS.contains(&extension.as_str())
        {
            continue;
        }
        let copy = to.join(name);
        if path.is_dir() {
            fs::create_dir(&copy).map_err(at(&copy))?;
            copy_others(&path, &copy)?;
        } else {
            // Not `fs::copy`, which copies permissions too. Follows links, as model caches have them.
            fs::write(&copy, fs::read(&path).map_err(at(&path))?).map_err(at(&copy))?;
        }
    }
    Ok(())
}

fn damaged(base: &Path, file: &str, error: impl Display) -> ModelError {
    ModelError::model(base, format!("{file}: {error}"))
}

#[cfg(test)]
mod tests;
