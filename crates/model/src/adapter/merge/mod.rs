//! Base and adapter as one model directory: every adapted weight becomes `W + scale * B A`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device, Tensor};
use safetensors::tensor::{TensorView, View};
use serde_json::{Map, Value, json};

use hone_core::files::{at, remove_any, sibling, sync_dir, write_synced};

use super::peft;
use super::weights::PREFIX;
use crate::adapter::ModuleRules;
use crate::{ModelError, Result};

const CONFIG: &str = "config.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Endings of files that hold weights, which would still be the unmerged ones, or caches.
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

/// How merged weights are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// As the base has each of them; sums are made in f32 and rounded once.
    #[default]
    Base,
    /// All floats in f32.
    F32,
}

/// What a merge wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Merged {
    /// Weights that the adapter changed.
    pub modules: usize,
    /// Tensors in all.
    pub tensors: usize,
    /// Bytes of them.
    pub bytes: u64,
}

/// One module's adapter: A `[r, in]` and B `[out, r]` in f32.
struct Delta {
    a: Tensor,
    b: Tensor,
    scale: f64,
}

/// Writes a model directory that transformers loads without PEFT: the base's weights with an adapter
/// merged in, shard by shard under the base's file names, and copies of all other files. A tied
/// output layer stays tied. The directory appears whole or not at all.
///
/// `base` holds `config.json` and `model.safetensors` or shards with their index; `adapter` is a PEFT
/// directory for it. One tensor is in memory at a time, beside the adapter.
///
/// # Errors
/// If `target` exists, a file is missing or damaged, the base is quantised, the adapter uses an
/// option we do not compute or is on a weight that the base does not have, or a merged value is not
/// finite in the type it is stored in. Nothing is left behind.
pub fn merge(base: &Path, adapter: &Path, target: &Path, precision: Precision) -> Result<Merged> {
    if fs::symlink_metadata(target).is_ok() {
        return Err(at(target)(std::io::ErrorKind::AlreadyExists.into()).into());
    }
    let config = config(base, precision)?;
    let deltas = deltas(adapter)?;
    let shards = shards(base)?;
    let parent = target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(parent).map_err(at(parent))?;
    let temporary = sibling(target, ".tmp");
    remove_any(&temporary)?;
    let written = fs::create_dir(&temporary)
        .map_err(|error| at(&temporary)(error).into())
        .and_then(|()| write(base, adapter, &temporary, (&config, &shards), &deltas, precision));
    let merged = match written {
        Ok(merged) => merged,
        Err(error) => {
            // The first error is the one to tell.
            let _second = remove_any(&temporary);
            return Err(error);
        }
    };
    fs::rename(&temporary, target).map_err(at(target))?;
    sync_dir(parent)?;
    Ok(merged)
}

fn write(
    base: &Path,
    adapter: &Path,
    out: &Path,
    (config, shards): (&[u8], &[String]),
    deltas: &BTreeMap<String, Delta>,
    precision: Precision,
) -> Result<Merged> {
    let mut missing: BTreeSet<&String> = deltas.keys().collect();
    let mut weight_map = BTreeMap::new();
    let mut merged = Merged { modules: deltas.len(), tensors: 0, bytes: 0 };
    for shard in shards {
        let path = base.join(shard);
        // SAFETY: the mapping is read and dropped within this block; a file that is changed
        // meanwhile could at worst give wrong numbers, as any read of it would.
        let file = unsafe { MmapedSafetensors::new(&path) }
            .map_err(|e| model(base, format!("{shard}: {e}")))?;
        let entries = layout(&file.tensors(), precision);
        let out = out.join(shard);
        let mut writer = BufWriter::new(File::create(&out).map_err(at(&out))?);
        writer.write_all(&header(&entries)?).map_err(at(&out))?;
        for entry in &entries {
            let bytes = match deltas.get(&entry.name) {
                None if entry.dtype.is_none() => {
                    let view = file.get(&entry.name).map_err(|e| model(base, e.to_string()))?;
                    view.data().to_vec()
                }
                delta => {
                    let weight = file.load(&entry.name, &Device::Cpu)?;
                    bytes_of(&added(&entry.name, weight, delta, entry.dtype, base)?)
                }
            };
            writer.write_all(&bytes).map_err(at(&out))?;
            missing.remove(&entry.name);
            merged.tensors += 1;
            merged.bytes += bytes.len() as u64;
            weight_map.insert(entry.name.clone(), shard.clone());
        }
        let file = writer.into_inner().map_err(|e| at(&out)(e.into_error()))?;
        file.sync_all().map_err(at(&out))?;
    }
    if let Some(name) = missing.first() {
        let reason = format!("it changes `{name}`, which the base in {} lacks", base.display());
        return Err(ModelError::Adapter { path: adapter.to_owned(), reason });
    }
    copy_others(base, out)?;
    write_synced(&out.join(CONFIG), config)?;
    if shards != [SINGLE] {
        write_synced(&out.join(INDEX), &index(base, weight_map, merged.bytes)?)?;
    }
    sync_dir(out)?;
    Ok(merged)
}

/// One tensor of a file to be written.
struct Entry {
    name: String,
    /// What the header calls its type.
    stored: safetensors::Dtype,
    /// The type to convert to; `None` keeps it.
    dtype: Option<DType>,
    shape: Vec<usize>,
    bytes: usize,
}

/// The tensors in the order they are written: widest types first, which keeps all of them aligned.
fn layout(tensors: &[(String, TensorView<'_>)], precision: Precision) -> Vec<Entry> {
    use safetensors::Dtype::{BF16, F16, F32, F64};

    let mut entries: Vec<Entry> = tensors
        .iter()
        .map(|(name, view)| {
            let (name, shape) = (name.clone(), view.shape().to_vec());
            let widen = precision == Precision::F32 && matches!(view.dtype(), F16 | BF16 | F64);
            if widen {
                let bytes = 4 * shape.iter().product::<usize>();
                Entry { name, stored: F32, dtype: Some(DType::F32), shape, bytes }
            } else {
                let bytes = view.data().len();
                Entry { name, stored: view.dtype(), dtype: None, shape, bytes }
            }
        })
        .collect();
    entries.sort_by(|a, b| (b.stored.bitsize(), &a.name).cmp(&(a.stored.bitsize(), &b.name)));
    entries
}

/// The length and the JSON that a safetensors file begins with.
fn header(entries: &[Entry]) -> Result<Vec<u8>> {
    let mut map = Map::from_iter([("__metadata__".to_owned(), json!({"format": "pt"}))]);
    let mut start = 0;
    for Entry { name, stored, shape, bytes, .. } in entries {
        let end = start + bytes;
        let entry = json!({"dtype": stored, "shape": shape, "data_offsets": [start, end]});
        map.insert(name.clone(), entry);
        start = end;
    }
    let mut text = serde_json::to_vec(&map).map_err(candle_core::Error::wrap)?;
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.extend(text);
    Ok(header)
}

/// `weight + scale B A` in f32, then in the type it is stored in.
fn added(
    name: &str,
    weight: Tensor,
    delta: Option<&Delta>,
    dtype: Option<DType>,
    base: &Path,
) -> Result<Tensor> {
    let dtype = dtype.unwrap_or(weight.dtype());
    let Some(Delta { a, b, scale }) = delta else { return Ok(weight.to_dtype(dtype)?) };
    if !matches!(weight.dtype(), DType::F64 | DType::F32 | DType::F16 | DType::BF16) {
        return Err(model(base, format!("`{name}` holds {:?}, not floats", weight.dtype())));
    }
    let [out, inp] = [b.dims()[0], a.dims()[1]];
    if weight.dims() != [out, inp] {
        let (found, wanted) = (weight.dims(), [out, inp]);
        return Err(model(base, format!("`{name}` is {found:?}, but the adapter {wanted:?}")));
    }
    let change = (b.matmul(a)? * *scale)?;
    let sum = (weight.to_dtype(DType::F32)? + change)?.to_dtype(dtype)?;
    let greatest = sum.abs()?.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    if greatest.iter().all(|x| x.is_finite()) {
        return Ok(sum);
    }
    Err(model(base, format!("`{name}` is not finite once merged in {dtype:?}; try f32")))
}

fn bytes_of(tensor: &Tensor) -> Vec<u8> {
    View::data(&tensor).into_owned()
}

/// `config.json`, which says in which type the weights are.
fn config(base: &Path, precision: Precision) -> Result<Vec<u8>> {
    let path = base.join(CONFIG);
    let text = fs::read(&path).map_err(at(&path))?;
    let mut value: Value =
        serde_json::from_slice(&text).map_err(|e| model(base, format!("{CONFIG}: {e}")))?;
    if !value["quantization_config"].is_null() {
        let reason =
            format!("{CONFIG} has a `quantization_config`: merge into the model as it was");
        return Err(model(base, reason));
    }
    if precision == Precision::Base {
        return Ok(text);
    }
    let fields = value.as_object_mut().ok_or_else(|| model(base, format!("{CONFIG} is no map")))?;
    // transformers 5 calls it `dtype`, and reads either.
    let key = if fields.contains_key("torch_dtype") { "torch_dtype" } else { "dtype" };
    fields.insert(key.to_owned(), json!("float32"));
    Ok(format!("{value:#}\n").into_bytes())
}

/// The adapter by the weights it changes.
fn deltas(dir: &Path) -> Result<BTreeMap<String, Delta>> {
    let wrong = |reason: String| ModelError::Adapter { path: dir.to_owned(), reason };
    let config = peft::read_config(dir)?;
    let rules = ModuleRules::new(&config).map_err(|(key, why)| wrong(format!("`{key}`: {why}")))?;
    let mut tensors = peft::read_tensors(dir, &Device::Cpu)?;
    let modules: BTreeSet<String> = tensors
        .keys()
        .map(|name| {
            let rest = name.strip_prefix(PREFIX).and_then(|rest| {
                rest.strip_suffix(".lora_A.weight").or_else(|| rest.strip_suffix(".lora_B.weight"))
            });
            let strange = || wrong(format!("`{name}` is not the name of a LoRA tensor"));
            Ok(rest.ok_or_else(strange)?.to_owned())
        })
        .collect::<Result<_>>()?;
    let mut deltas = BTreeMap::new();
    for module in modules {
        let mut take = |half: &str| -> Result<Tensor> {
            let name = format!("{PREFIX}{module}.{half}.weight");
            let tensor =
                tensors.remove(&name).ok_or_else(|| wrong(format!("`{name}` is missing")))?;
            Ok(tensor.to_dtype(DType::F32)?)
        };
        let (a, b) = (take("lora_A")?, take("lora_B")?);
        let factor = rules.factor(&module).ok_or_else(|| {
            wrong(format!("it has tensors on {module}, which its settings leave out"))
        })?;
        if a.rank() != 2 || b.rank() != 2 || a.dims()[0] != factor.r || b.dims()[1] != factor.r {
            let shapes = format!("{:?} and {:?}", a.dims(), b.dims());
            return Err(wrong(format!("{module} has {shapes} for rank {}", factor.r)));
        }
        deltas.insert(format!("{module}.weight"), Delta { a, b, scale: factor.scale });
    }
    if deltas.is_empty() {
        return Err(wrong("there is no tensor in it".to_owned()));
    }
    Ok(deltas)
}

/// Names of the files that hold the base's weights; like transformers, one file before shards.
fn shards(base: &Path) -> Result<Vec<String>> {
    if base.join(SINGLE).exists() {
        return Ok(vec![SINGLE.to_owned()]);
    }
    let path = base.join(INDEX);
    if !path.exists() {
        return Err(model(base, format!("there is neither {SINGLE} nor {INDEX} in it")));
    }
    let map = read_index(base)?["weight_map"].clone();
    let names: BTreeMap<String, String> =
        serde_json::from_value(map).map_err(|e| model(base, format!("{INDEX}: {e}")))?;
    let files: BTreeSet<String> = names.into_values().collect();
    if let Some(name) = files.iter().find(|name| name.contains(['/', '\\'])) {
        return Err(model(base, format!("{INDEX} names a file elsewhere: {name}")));
    }
    Ok(files.into_iter().collect())
}

fn read_index(base: &Path) -> Result<Value> {
    let path = base.join(INDEX);
    let text = fs::read(&path).map_err(at(&path))?;
    serde_json::from_slice(&text).map_err(|e| model(base, format!("{INDEX}: {e}")))
}

/// The base's index with the tensors and the size of now.
fn index(base: &Path, weight_map: BTreeMap<String, String>, bytes: u64) -> Result<Vec<u8>> {
    let mut value = read_index(base)?;
    value["metadata"]["total_size"] = bytes.into();
    value["weight_map"] = json!(weight_map);
    Ok(format!("{value:#}\n").into_bytes())
}

/// Copies what is neither weights, nor written otherwise, nor hidden; directories too.
fn copy_others(from: &Path, to: &Path) -> Result<()> {
    for entry in fs::read_dir(from).map_err(at(from))? {
        let path = entry.map_err(at(from))?.path();
        let name = path.file_name().unwrap_or_default();
        let ending = path.extension().and_then(|e| e.to_str()).unwrap_or("").to_lowercase();
        let text = name.to_string_lossy();
        if text.starts_with('.')
            || text.ends_with(".index.json")
            || WEIGHTS.contains(&ending.as_str())
        {
            continue;
        }
        let copy = to.join(name);
        if path.is_dir() {
            fs::create_dir(&copy).map_err(at(&copy))?;
            copy_others(&path, &copy)?;
        } else {
            // Caches of models are full of links; what they lead to is copied.
            write_synced(&copy, &fs::read(&path).map_err(at(&path))?)?;
        }
    }
    Ok(sync_dir(to)?)
}

fn model(base: &Path, reason: String) -> ModelError {
    ModelError::Model { path: base.to_owned(), reason }
}

#[cfg(test)]
mod tests;
