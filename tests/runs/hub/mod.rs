//! Datasets and models of the hub, through the binary and a hub on loopback.

mod server;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use insta::assert_snapshot;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::Value;
use server::{COMMIT, FakeHub, HubContent};
use tempfile::TempDir;

const CONVERTED: &str = "datasets/acme/sums/refs/convert/parquet";

/// A Parquet file with the rows `n + n = ?`.
fn parquet(numbers: Range<u64>) -> Vec<u8> {
    let prompts = numbers.clone().map(|n| format!("{n} + {n} = ?"));
    parquet_of(prompts.collect(), numbers.map(|n| (2 * n).to_string()).collect())
}

fn parquet_of(prompts: Vec<String>, answers: Vec<String>) -> Vec<u8> {
    let schema = "message rows { required binary prompt (UTF8); required binary answer (UTF8); }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut bytes = Vec::new();
    let mut file = SerializedFileWriter::new(&mut bytes, schema, Arc::default()).unwrap();
    let mut group = file.next_row_group().unwrap();
    for texts in [prompts, answers] {
        let values: Vec<ByteArray> = texts.iter().map(|t| ByteArray::from(t.as_str())).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&values, None, None).unwrap();
        column.close().unwrap();
    }
    group.close().unwrap();
    file.close().unwrap();
    bytes
}

fn files(names: &[(&str, Vec<u8>)]) -> BTreeMap<String, Vec<u8>> {
    names.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.clone())).collect()
}

/// A dataset with two configurations; the split `train` of `main` has two shards.
fn sums() -> HubContent {
    let names = [
        ("main/train/0000.parquet", parquet(0..6)),
        ("main/train/0001.parquet", parquet(6..11)),
        ("main/test/0000.parquet", parquet(20..24)),
        ("hard/partial-train/0000.parquet", parquet(0..3)),
        ("README.md", b"# Sums".to_vec()),
    ];
    HubContent {
        files: BTreeMap::from([(CONVERTED.to_owned(), files(&names))]),
        ..HubContent::default()
    }
}

/// `hone` in an empty directory, with the hub's variables.
struct Client {
    dir: TempDir,
    variables: Vec<(&'static str, String)>,
}

impl Client {
    fn new(endpoint: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().join("hf").display().to_string();
        let variables = vec![("HF_ENDPOINT", endpoint.to_owned()), ("HF_HOME", home)];
        Self { dir, variables }
    }

    fn with(mut self, name: &'static str, value: &str) -> Self {
        self.variables.push((name, value.to_owned()));
        self
    }

    /// Writes a configuration with these keys of `[dataset]`.
    fn configure(&self, keys: &str) {
        let text = format!(
            "[dataset]\n{keys}\n[rollout]\nmax_tokens = 4\n[run]\neval_prompts = 0\n\
             eval_samples = 1\n[[route]]\nname = 'default'\n[[route.reward]]\nname = 'correct'\n\
             kind = 'numeric_match'\n"
        );
        std::fs::write(self.dir.path().join("hone.toml"), text).unwrap();
    }

    fn run(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hone"));
        for name in ["http_proxy", "https_proxy", "all_proxy", "no_proxy"] {
            command.env_remove(name).env_remove(name.to_uppercase());
        }
        for name in ["HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_CACHE"] {
            command.env_remove(name);
        }
        command.args(args).current_dir(self.dir.path());
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command.output().unwrap()
    }

    /// The standard output of a command that succeeds, as JSON.
    fn json(&self, args: &[&str]) -> Value {
        let output = self.run(args);
        assert!(output.status.success(), "{args:?}\n{}", shown(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// The error of `hone validate` with these keys of `[dataset]`.
    fn error(&self, keys: &str) -> String {
        self.configure(keys);
        let output = self.run(&["validate", "--config", "hone.toml"]);
        assert_eq!(output.status.code(), Some(2), "{}", shown(&output));
        let endpoint = &self.variables[0].1;
        shown(&output).replace(endpoint, "HUB").trim_end().to_owned()
    }

    fn cached(&self, path: &str) -> PathBuf {
        self.dir.path().join("hf/hub").join(path)
    }
}

fn shown(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

const EVAL: [&str; 4] = ["eval", "--config", "hone.toml", "--json"];

#[test]
fn a_dataset_is_fetched_once_and_then_needs_no_hub() {
    let hub = FakeHub::start(HubContent { token: Some("secret"), redirects: true, ..sums() });
    let client = Client::new(&hub.url).with("HF_TOKEN", "secret");
    client.configure("path = 'hf://acme/sums'\nconfig = 'main'");
    assert_eq!(client.json(&EVAL)["prompts"], 11, "both shards");

    let requests = hub.take_requests();
    let (stored, listed): (Vec<_>, Vec<_>) = requests.into_iter().partition(|r| r.at_storage);
    assert_eq!(stored.len(), 2, "{stored:?}");
    assert!(stored.iter().all(|r| r.token.is_none()), "{stored:?}");
    assert!(listed.iter().all(|r| r.token.as_deref() == Some("Bearer secret")), "{listed:?}");
    let paths: Vec<&str> = listed.iter().map(|r| r.path.as_str()).collect();
    let file = |n| format!("/datasets/acme/sums/resolve/{COMMIT}/main/train/000{n}.parquet");
    let list = "/api/datasets/acme/sums/revision/refs%2Fconvert%2Fparquet?blobs=true";
    assert_eq!(paths, [list, &file(0), &file(1)]);

    // Another split is of the same commit; nothing else is fetched again.
    let split = "path = 'hf://acme/sums'\nconfig = 'main'\neval_path = 'hf://acme/sums'";
    client.configure(split);
    assert_eq!(client.json(&EVAL)["prompts"], 4);
    let fetched: Vec<String> = hub.take_requests().into_iter().map(|r| r.path).collect();
    let test = format!("/datasets/acme/sums/resolve/{COMMIT}/main/test/0000.parquet");
    assert_eq!(fetched, [test.clone(), test], "at the hub and at its storage");

    drop(hub);
    assert_eq!(client.json(&EVAL)["prompts"], 4);
    let train = ["train", "--config", "hone.toml", "--steps", "1", "--json"];
    let report = client.json(&train);
    assert_eq!(report["ending"], "finished");
    assert_eq!(report["name"], "hf://acme/sums");
    // A commit is its own revision.
    client.configure(&format!("{split}\nrevision = '{COMMIT}'"));
    assert_eq!(client.json(&EVAL)["prompts"], 4);
}

#[test]
fn a_token_file_and_the_branch_main_serve_as_well() {
    let names = [("data/train-00000-of-00001.parquet", parquet(0..3))];
    let files = BTreeMap::from([("datasets/sums/main".to_owned(), files(&names))]);
    let hub = FakeHub::start(HubContent { files, token: Some("s3"), ..HubContent::default() });
    let client = Client::new(&hub.url);
    client.configure("path = 'hf://sums'");
    std::fs::create_dir(client.dir.path().join("hf")).unwrap();
    std::fs::write(client.dir.path().join("hf/token"), "s3\n").unwrap();
    assert_eq!(client.json(&EVAL)["prompts"], 3);
    assert!(client.cached(&format!("datasets--sums/snapshots/{COMMIT}/{}", names[0].0)).is_file());
}

#[test]
fn errors_say_what_to_change() {
    let hub = FakeHub::start(sums());
    let client = Client::new(&hub.url);
    assert_snapshot!(client.error("path = 'hf://acme/sums'"), @r#"error: dataset.config is "": hf://acme/sums has hard and main"#);
    assert_snapshot!(client.error("path = 'hf://acme/sums'\nconfig = 'main'\nsplit = 'dev'"), @r#"error: dataset.split is "dev": hf://acme/sums (main) has test and train"#);
    assert_snapshot!(client.error("path = 'a.jsonl'\neval_path = 'hf://acme/sums'\nconfig = 'main'\neval_split = 'dev'"), @r#"error: dataset.eval_split is "dev": hf://acme/sums (main) has test and train"#);
    assert_snapshot!(client.error("path = 'hf://acme/nothing'"), @"error: hf://acme/nothing does not exist on HUB");
    assert_snapshot!(client.error("path = 'hf://acme/sums'\nrevision = 'v9'"), @"error: hf://acme/sums does not exist on HUB, or has no revision v9");
    assert_snapshot!(client.error("path = 'hf://a/b/c'"), @r#"error: dataset.path is "hf://a/b/c": it must be a file or hf://OWNER/NAME"#);
    assert_snapshot!(client.error("path = 'acme/sums'"), @r#"error: dataset.path: there is no file "acme/sums"; a dataset of the hub is written "hf://acme/sums""#);

    let text = BTreeMap::from([("datasets/o/text/main".to_owned(), files(&[("a.jsonl", vec![])]))]);
    let hub = FakeHub::start(HubContent { files: text, ..HubContent::default() });
    assert_snapshot!(Client::new(&hub.url).error("path = 'hf://o/text'"), @"error: hf://o/text has no Parquet files: convert it, or set dataset.path to a file");

    let hub = FakeHub::start(HubContent { token: Some("secret"), ..sums() });
    assert_snapshot!(Client::new(&hub.url).error("path = 'hf://acme/sums'"), @"error: hf://acme/sums: the hub at HUB refuses access (status 401): it is private, gated or does not exist; HF_TOKEN is not set");
    let client = Client::new(&hub.url).with("HF_TOKEN", "wrong");
    assert_snapshot!(client.error("path = 'hf://acme/sums'"), @"error: hf://acme/sums: the hub at HUB refuses access (status 401): the token gives no access to it, or it does not exist");
    let client = Client::new(&hub.url).with("HF_TOKEN", "ab\u{7}c");
    assert_snapshot!(client.error("path = 'hf://acme/sums'"), @"error: the token in HF_TOKEN or in the token file must be printable ASCII");

    let url = hub.url.clone();
    drop(hub);
    assert_snapshot!(Client::new(&url).error("path = 'hf://acme/sums'"), @"error: hf://acme/sums: the hub at HUB cannot be reached (Connection refused (os error 111)); without it, set dataset.path to a file");
}

#[test]
fn an_interrupted_download_continues() {
    let hub = FakeHub::start(HubContent { truncate_at: Some(100), ..sums() });
    let client = Client::new(&hub.url);
    let keys = "path = 'hf://acme/sums'\nconfig = 'main'";
    assert_snapshot!(client.error(keys), @"error: hf://acme/sums: the download of main/train/0000.parquet ended after 100 bytes: end of file before message length reached");
    let ranges: Vec<_> = hub.take_requests().into_iter().map(|r| r.range).collect();
    let from_100 = Some("bytes=100-".to_owned());
    assert_eq!(ranges, [None, None, from_100.clone(), from_100.clone()]);
    drop(hub);

    let hub = FakeHub::start(sums());
    let mut client = client;
    client.variables[0].1.clone_from(&hub.url);
    assert_eq!(client.json(&EVAL)["prompts"], 11);
    let requests: Vec<_> = hub.take_requests().into_iter().map(|r| r.range).collect();
    assert_eq!(requests, [from_100, None], "the rest of the first shard, then the second");
    let shard = format!("datasets--acme--sums/snapshots/{COMMIT}/main/train/0000.parquet");
    assert_eq!(std::fs::read(client.cached(&shard)).unwrap(), parquet(0..6));
}

#[test]
fn rows_are_numbered_through_all_shards() {
    let error = |shard: Vec<u8>| {
        let mut content = sums();
        let name = "main/train/0001.parquet".to_owned();
        content.files.get_mut(CONVERTED).unwrap().insert(name, shard);
        let hub = FakeHub::start(content);
        let client = Client::new(&hub.url);
        client.configure("path = 'hf://acme/sums'\nconfig = 'main'");
        let cache = client.dir.path().display().to_string();
        shown(&client.run(&EVAL)).trim_end().replace(&cache, "DIR")
    };
    let blank = parquet_of(vec!["1 + 1 = ?".to_owned(), String::new()], vec![String::new(); 2]);
    assert_snapshot!(error(blank), @"error: `hf://acme/sums`, row 8: `prompt` is empty");
    // An error of the whole shard names its file.
    assert_snapshot!(error(vec![0; 50]), @"error: `DIR/hf/hub/datasets--acme--sums/snapshots/0123456789abcdef0123456789abcdef01234567/main/train/0001.parquet`: it is not Parquet that can be read: Parquet error: Invalid Parquet file. Corrupt footer");
}

#[test]
fn a_split_that_the_hub_converted_in_part_is_used_with_a_warning() {
    let hub = FakeHub::start(sums());
    let client = Client::new(&hub.url);
    client.configure("path = 'hf://acme/sums'\nconfig = 'hard'");
    let output = client.run(&EVAL);
    assert!(output.status.success(), "{}", shown(&output));
    let warning = "hf://acme/sums: the hub has only the beginning of split train as Parquet";
    assert!(shown(&output).contains(warning), "{}", shown(&output));
}

#[test]
fn proxies_are_those_of_the_environment() {
    // The hub of the test acts as the proxy of another hub, which does not exist.
    let hub = FakeHub::start(sums());
    let client = Client::new("http://hub.invalid").with("http_proxy", &hub.url);
    client.configure("path = 'hf://acme/sums'\nconfig = 'main'");
    assert_eq!(client.json(&EVAL)["prompts"], 11);
    assert!(hub.take_requests().iter().all(|r| r.path.starts_with("http://hub.invalid/")));
    let client = Client::new(&hub.url).with("http_proxy", "http://127.0.0.1:1");
    let client = client.with("no_proxy", "127.0.0.1");
    client.configure("path = 'hf://acme/sums'\nconfig = 'main'");
    assert_eq!(client.json(&EVAL)["prompts"], 11);
}

#[test]
fn a_model_uses_the_same_endpoint_token_and_cache() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/qwen2-tiny");
    let mut names = BTreeMap::new();
    for entry in std::fs::read_dir(fixture).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        names.insert(name, std::fs::read(path).unwrap());
    }
    let files = BTreeMap::from([("models/acme/tiny/main".to_owned(), names)]);
    let content = HubContent { files, token: Some("t"), redirects: true, ..HubContent::default() };
    let hub = FakeHub::start(content);
    let args = ["train", "--model", "acme/tiny", "--explain-memory"];
    let refused = Client::new(&hub.url).run(&args);
    assert_snapshot!(shown(&refused).replace(&hub.url, "HUB").trim_end(), @"error: acme/tiny: the hub at HUB refuses access (status 401): it is private, gated or does not exist; HF_TOKEN is not set");

    let cache = tempfile::tempdir().unwrap();
    let client = Client::new(&hub.url).with("HF_TOKEN", "t");
    let client = client.with("HF_HUB_CACHE", cache.path().to_str().unwrap());
    let output = client.run(&args);
    assert!(output.status.success(), "{}", shown(&output));
    let requests = hub.take_requests();
    assert!(requests.iter().any(|r| r.at_storage && r.path.ends_with("/model.safetensors")));
    assert!(requests.iter().all(|r| r.token.is_none() || !r.at_storage), "{requests:?}");
    assert!(cache.path().join("models--acme--tiny/refs/main").is_file());
    let url = hub.url.clone();
    drop(hub);
    assert!(client.run(&args).status.success());
    let unreachable = shown(&Client::new(&url).run(&args)).replace(&url, "HUB");
    assert_snapshot!(unreachable.trim_end(), @"error: acme/tiny: the hub at HUB cannot be reached (Connection refused (os error 111)); without it, set model.path to a directory");
    let args = ["train", "--model", "no such model", "--explain-memory"];
    assert_snapshot!(shown(&client.run(&args)).trim_end(), @r#"error: model.path is "no such model": it must be a directory, a GGUF file or a hub id of the form organization/name"#);
}
