//! Datasets named by id, as Parquet.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use hone_core::config::{Checked, Problem, quoted};

use crate::cache::{ListedFile, Listing, Repo, RepoCache, RepoKind, is_id, is_inside};
use crate::client::Hub;
use crate::error::{HubError, HubErrorKind};

/// Beginning of a path that names a dataset of the hub.
pub const SCHEME: &str = "hf://";

/// Branch on which the hub keeps a dataset as `CONFIG/SPLIT/NNNN.parquet`, converted from any format.
const CONVERTED: &str = "refs/convert/parquet";
const BRANCH: &str = "main";
/// Configuration of files that are in no configuration's folder.
const DEFAULT_CONFIG: &str = "default";
/// Folder of a split of which the hub converted only the beginning.
const PARTIAL: &str = "partial-";

/// A split of a dataset.
#[derive(Clone, Copy, Debug)]
pub struct DatasetQuery<'a> {
    /// `OWNER/NAME`, or `NAME`.
    pub id: &'a str,
    /// Configuration; empty for the only one, or else for `default`.
    pub config: &'a str,
    /// Split.
    pub split: &'a str,
    /// The key that sets the split, for errors.
    pub split_key: &'static str,
    /// Branch, tag or commit; empty for the hub's Parquet branch, or else `main`.
    pub revision: &'a str,
}

/// A split on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubDataset {
    /// The commit of the files.
    pub commit: String,
    /// Parquet files, in order.
    pub files: Vec<PathBuf>,
    /// Whether the hub has only the beginning of the split as Parquet.
    pub partial: bool,
}

/// The id in a path of the form `hf://OWNER/NAME`; `None` for any other path.
///
/// # Errors
/// If the path begins with `hf://` but does not continue with an id.
pub fn dataset_id(path: &Path) -> Option<Result<&str, HubError>> {
    let id = path.to_str()?.strip_prefix(SCHEME)?;
    Some(if is_id(id, true) { Ok(id) } else { Err(no_id(&path.display().to_string())) })
}

fn no_id(text: &str) -> HubError {
    HubError::other(format!("{text:?} is not of the form hf://OWNER/NAME"))
}

/// Checks that `revision` can be a branch, a tag or a commit.
///
/// # Errors
/// Names `key`.
pub fn check_revision(key: &str, revision: &str) -> Checked {
    if revision.is_empty() || is_inside(revision) {
        return Ok(());
    }
    Err(Problem::value(key, quoted(revision), "a branch, a tag or a commit"))
}

impl Hub {
    /// The files of a split, which are fetched if the cache lacks them.
    ///
    /// # Errors
    /// If the hub cannot be reached or refuses access, or if it has no Parquet of this split; the
    /// error lists the configurations or the splits that it has.
    pub async fn dataset(&self, query: &DatasetQuery<'_>) -> Result<HubDataset, HubError> {
        let repo = Repo { kind: RepoKind::Dataset, id: query.id };
        let revisions = match query.revision {
            "" => vec![CONVERTED, BRANCH],
            revision => vec![revision],
        };
        let cache = RepoCache::new(&self.cache, &repo);
        for listing in revisions.iter().filter_map(|revision| cache.listing(revision)) {
            // A split that the cached commit lacks may be in a newer one.
            if let Ok(selection) = Selection::new(&listing, query) {
                return self.selected(&repo, &listing.commit, selection).await;
            }
        }
        let mut failed = no_id(&repo.name());
        for (index, revision) in revisions.iter().enumerate() {
            let listing = match self.list(&repo, revision, query.revision).await {
                Ok(listing) => listing,
                Err(error) if error.kind == HubErrorKind::Missing => {
                    // Less informative than a branch without Parquet.
                    failed = if index == 0 { error } else { failed };
                    continue;
                }
                Err(error) => return Err(error),
            };
            match Selection::new(&listing, query) {
                Ok(selection) => return self.selected(&repo, &listing.commit, selection).await,
                Err(error) if error.kind == HubErrorKind::Format => failed = error,
                Err(error) => return Err(error),
            }
        }
        Err(failed)
    }

    async fn selected(
        &self,
        repo: &Repo<'_>,
        commit: &str,
        selection: Selection<'_>,
    ) -> Result<HubDataset, HubError> {
        self.fetch(repo, commit, &selection.files).await?;
        let dir = RepoCache::new(&self.cache, repo).snapshot(commit);
        let files = selection.files.iter().map(|file| dir.join(&file.name)).collect();
        Ok(HubDataset { commit: commit.to_owned(), files, partial: selection.partial })
    }
}

/// The files of one split.
#[derive(Debug, PartialEq)]
struct Selection<'a> {
    files: Vec<&'a ListedFile>,
    partial: bool,
}

impl<'a> Selection<'a> {
    fn new(listing: &'a Listing, query: &DatasetQuery<'_>) -> Result<Self, HubError> {
        let repo = format!("{SCHEME}{}", query.id);
        let mut all: Vec<(SplitShard, &ListedFile)> =
            listing.files.iter().filter_map(|f| Some((SplitShard::of(&f.name)?, f))).collect();
        if all.is_empty() {
            let what = "Parquet files: convert it, or set dataset.path to a file";
            return Err(HubError::format(&repo, what));
        }
        all.sort_by(|a, b| a.1.name.cmp(&b.1.name));
        let configs: BTreeSet<String> = all.iter().map(|(shard, _)| shard.config.clone()).collect();
        let config = match query.config {
            "" if configs.len() == 1 => configs.first(),
            "" => configs.get(DEFAULT_CONFIG),
            config => configs.get(config),
        };
        let Some(config) = config else {
            let known: Vec<String> = configs.into_iter().collect();
            return Err(HubError::choice("dataset.config", query.config, &repo, &known));
        };
        all.retain(|(shard, _)| shard.config == *config);
        let splits: BTreeSet<&str> = all.iter().map(|(shard, _)| shard.split.as_str()).collect();
        if !splits.contains(query.split) {
            let repo = if configs.len() > 1 { format!("{repo} ({config})") } else { repo };
            let known: Vec<String> = splits.into_iter().map(str::to_owned).collect();
            return Err(HubError::choice(query.split_key, query.split, &repo, &known));
        }
        all.retain(|(shard, _)| shard.split == query.split);
        // A complete split, if the repository has both.
        let partial = all.iter().all(|(shard, _)| shard.partial);
        all.retain(|(shard, _)| shard.partial == partial);
        Ok(Self { files: all.into_iter().map(|(_, file)| file).collect(), partial })
    }
}

/// What the name of a Parquet file says about its rows.
#[derive(Debug, PartialEq, Eq)]
struct SplitShard {
    config: String,
    split: String,
    partial: bool,
}

impl SplitShard {
    /// Reads `[data/][CONFIG/]SPLIT/NNNN.parquet` and `[data/][CONFIG/]SPLIT[-NNNNN-of-NNNNN].parquet`.
    fn of(name: &str) -> Option<Self> {
        let stem = name.strip_suffix(".parquet")?;
        let mut folders: Vec<&str> = stem.split('/').collect();
        let stem = folders.pop()?;
        if folders.first() == Some(&"data") {
            folders.remove(0);
        }
        // The part before the number of the shard: `train` of `train-00000-of-00002`.
        let numbered = |text: &str| text.starts_with(|c: char| c.is_ascii_digit());
        let own: Vec<&str> = stem.split('-').take_while(|part| !numbered(part)).collect();
        let own = own.join("-");
        let in_folder = (own.is_empty() || own == "part").then(|| folders.pop()).flatten();
        let split = in_folder.unwrap_or(&own);
        let whole = split.strip_prefix(PARTIAL);
        let config = if folders.is_empty() { DEFAULT_CONFIG.to_owned() } else { folders.join("/") };
        Some(Self { config, split: whole.unwrap_or(split).to_owned(), partial: whole.is_some() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing(names: &[&str]) -> Listing {
        let files = names.iter().map(|n| ListedFile { name: (*n).to_owned(), size: None });
        Listing { commit: "0123456789".to_owned(), files: files.collect() }
    }

    fn query<'a>(config: &'a str, split: &'a str) -> DatasetQuery<'a> {
        DatasetQuery { id: "o/n", config, split, split_key: "dataset.split", revision: "" }
    }

    /// The names of the files, or the error.
    fn select(names: &[&str], config: &str, split: &str) -> String {
        match Selection::new(&listing(names), &query(config, split)) {
            Ok(found) => {
                let mut names: Vec<&str> = found.files.iter().map(|f| f.name.as_str()).collect();
                if found.partial {
                    names.push("partial");
                }
                names.join(" ")
            }
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn names_give_the_configuration_and_the_split() {
        for (name, config, split) in [
            ("main/train/0000.parquet", "main", "train"),
            ("default/partial-train/0012.parquet", "default", "train"),
            ("main/train-00000-of-00001.parquet", "main", "train"),
            ("data/train-00000-of-00002-0a1b2c.parquet", "default", "train"),
            ("data/train_sft-00000-of-00002.parquet", "default", "train_sft"),
            ("data/en/test-00000-of-00001.parquet", "en", "test"),
            ("train-00000-of-00001.parquet", "default", "train"),
            ("train.parquet", "default", "train"),
            ("train/0000.parquet", "default", "train"),
            ("train/part-00000.parquet", "default", "train"),
            ("a/b/validation.parquet", "a/b", "validation"),
        ] {
            let shard = SplitShard::of(name).unwrap();
            assert_eq!((shard.config.as_str(), shard.split.as_str()), (config, split), "{name}");
            assert_eq!(shard.partial, name.contains("partial"), "{name}");
        }
        assert_eq!(SplitShard::of("README.md"), None);
    }

    #[test]
    fn shards_are_selected_in_order() {
        let one = ["data/train-00001-of-00002.parquet", "data/train-00000-of-00002.parquet"];
        assert_eq!(select(&one, "", "train"), format!("{} {}", one[1], one[0]));
        let two = ["README.md", "main/train/0000.parquet", "socratic/train/0000.parquet"];
        assert_eq!(select(&two, "socratic", "train"), two[2]);
        let default = ["default/train/0.parquet", "other/train/0.parquet"];
        assert_eq!(select(&default, "", "train"), default[0]);
        let partial = ["default/partial-train/0.parquet", "default/test/0.parquet"];
        assert_eq!(select(&partial, "", "train"), format!("{} partial", partial[0]));
    }

    #[test]
    fn errors_list_what_the_dataset_has() {
        let files = ["main/train/0.parquet", "main/test/0.parquet", "socratic/train/0.parquet"];
        insta::assert_snapshot!(select(&files, "", "train"), @r#"dataset.config is "": hf://o/n has main and socratic"#);
        insta::assert_snapshot!(select(&files, "mian", "train"), @r#"dataset.config is "mian": hf://o/n has main and socratic"#);
        insta::assert_snapshot!(select(&files, "main", "validation"), @r#"dataset.split is "validation": hf://o/n (main) has test and train"#);
        insta::assert_snapshot!(select(&files[..2], "", "dev"), @r#"dataset.split is "dev": hf://o/n has test and train"#);
        insta::assert_snapshot!(select(&["train.jsonl"], "", "train"), @"hf://o/n has no Parquet files: convert it, or set dataset.path to a file");
        let many: Vec<String> = (0..25).map(|i| format!("c{i:02}/train/0.parquet")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        insta::assert_snapshot!(select(&many, "", "train"), @r#"dataset.config is "": hf://o/n has c00, c01, c02, c03, c04, c05, c06, c07, c08, c09, c10, c11, c12, c13, c14, c15, c16, c17, c18, c19 and 5 more"#);
    }

    #[test]
    fn ids_and_revisions_cannot_leave_the_cache() {
        fn id(path: &str) -> Option<Result<&str, HubError>> {
            dataset_id(Path::new(path))
        }
        assert_eq!(id("hf://openai/gsm8k").unwrap().unwrap(), "openai/gsm8k");
        assert_eq!(id("hf://gsm8k").unwrap().unwrap(), "gsm8k");
        assert!(id("datasets/additions.jsonl").is_none());
        for path in ["hf://", "hf://a/b/c", "hf://../x", "hf://a b/c", "hf:///x"] {
            assert!(id(path).unwrap().is_err(), "{path}");
        }
        insta::assert_snapshot!(id("hf://a/b/c").unwrap().unwrap_err(), @r#""hf://a/b/c" is not of the form hf://OWNER/NAME"#);
        for revision in ["", "main", "refs/pr/1", "v1.0"] {
            check_revision("dataset.revision", revision).unwrap();
        }
        let error = check_revision("dataset.revision", "../../x").unwrap_err();
        insta::assert_snapshot!(error.sentence(), @r#"dataset.revision is "../../x": it must be a branch, a tag or a commit"#);
    }
}
