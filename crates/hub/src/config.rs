//! Configuration section `[hub]`.

use std::path::{Path, PathBuf};

use reqwest::Url;
use serde::{Deserialize, Serialize};

use hone_core::config::{Checked, Problem, Secret, quoted};

/// The hub that `endpoint` and `HF_ENDPOINT` replace.
const PUBLIC: &str = "https://huggingface.co";

const URL: &str = "an http:// or https:// URL";

/// Where models and datasets named by id come from, and where they are kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HubConfig {
    /// URL of the hub or of a mirror; empty uses `HF_ENDPOINT`, else the public hub.
    pub endpoint: String,
    /// Environment variable of the access token. If it is not set, the token file of the hub's own
    /// clients applies. Empty sends no token.
    pub token_env: String,
    /// Directory of downloads; empty uses `HF_HUB_CACHE`, else `HF_HOME/hub`, else `hub` in the data
    /// directory.
    pub cache: PathBuf,
    /// What the loader found in the environment.
    #[serde(skip)]
    pub environment: HubEnvironment,
}

/// Values from the environment, where the hub's own clients look for them too.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HubEnvironment {
    /// `HF_ENDPOINT`.
    pub endpoint: String,
    /// The token in the variable that `token_env` names.
    pub token: Option<Secret>,
    /// File of the token, which may not exist.
    pub token_file: PathBuf,
    /// `HF_HUB_CACHE` or `HF_HOME/hub`.
    pub cache: PathBuf,
}

impl Default for HubConfig {
    fn default() -> Self {
        Self {
            endpoint: String::new(),
            token_env: "HF_TOKEN".to_owned(),
            cache: PathBuf::new(),
            environment: HubEnvironment::default(),
        }
    }
}

impl HubConfig {
    /// Checks the endpoint.
    ///
    /// # Errors
    /// If it is no URL.
    pub fn check(&self) -> Checked {
        if self.endpoint.is_empty() || is_url(&self.endpoint) {
            return Ok(());
        }
        Err(Problem::value("hub.endpoint", quoted(&self.endpoint), URL))
    }

    /// Reads the environment with `lookup`. An empty variable counts as unset.
    ///
    /// # Errors
    /// A sentence, if `HF_ENDPOINT` is no URL.
    pub fn resolve(&mut self, lookup: impl Fn(&str) -> Option<String>) -> Result<(), String> {
        let set = |name: &str| lookup(name).filter(|value| !value.is_empty());
        let path = |name: &str| set(name).map(PathBuf::from);
        let home = path("HF_HOME");
        let endpoint = set("HF_ENDPOINT").unwrap_or_default();
        if !endpoint.is_empty() && !is_url(&endpoint) {
            return Err(Problem::value("HF_ENDPOINT", quoted(&endpoint), URL).sentence());
        }
        let cached = || {
            let cache = path("XDG_CACHE_HOME").or_else(|| Some(path("HOME")?.join(".cache")))?;
            Some(cache.join("huggingface"))
        };
        self.environment = HubEnvironment {
            endpoint,
            token: set(&self.token_env).map(Secret::new),
            token_file: path("HF_TOKEN_PATH")
                .or_else(|| Some(home.clone().or_else(cached)?.join("token")))
                .unwrap_or_default(),
            cache: path("HF_HUB_CACHE")
                .or_else(|| Some(home.as_ref()?.join("hub")))
                .unwrap_or_default(),
        };
        Ok(())
    }

    pub(crate) fn endpoint_in_use(&self) -> &str {
        let candidates = [self.endpoint.as_str(), &self.environment.endpoint, PUBLIC];
        let used = candidates.into_iter().find(|url| !url.is_empty()).unwrap_or(PUBLIC);
        used.trim_end_matches('/')
    }

    pub(crate) fn cache_in_use(&self, data: &Path) -> PathBuf {
        let candidates = [&self.cache, &self.environment.cache];
        let used = candidates.into_iter().find(|path| !path.as_os_str().is_empty());
        used.cloned().unwrap_or_else(|| data.join("hub"))
    }

    /// The token of the environment or of the token file.
    pub(crate) fn token(&self) -> Option<Secret> {
        if self.token_env.is_empty() {
            return None;
        }
        self.environment.token.clone().or_else(|| {
            let text = std::fs::read_to_string(&self.environment.token_file).ok()?;
            Some(text.trim()).filter(|text| !text.is_empty()).map(Secret::new)
        })
    }
}

fn is_url(text: &str) -> bool {
    Url::parse(text).is_ok_and(|url| matches!(url.scheme(), "http" | "https") && url.has_host())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(config: HubConfig, env: &[(&str, &str)]) -> HubConfig {
        let mut config = config;
        let lookup =
            |name: &str| env.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        config.resolve(lookup).unwrap();
        config
    }

    #[test]
    fn keys_precede_variables_and_variables_precede_defaults() {
        let data = Path::new("data");
        let plain = resolved(HubConfig::default(), &[("HF_ENDPOINT", ""), ("HF_TOKEN", "")]);
        assert_eq!(plain.endpoint_in_use(), "https://huggingface.co");
        assert_eq!(plain.cache_in_use(data), Path::new("data/hub"));
        assert_eq!(plain.token(), None);

        let env = [
            ("HF_ENDPOINT", "http://mirror/"),
            ("HF_HOME", "/home/hf"),
            ("HF_TOKEN", "t1"),
            ("OTHER", "t2"),
        ];
        let from_env = resolved(HubConfig::default(), &env);
        assert_eq!(from_env.endpoint_in_use(), "http://mirror");
        assert_eq!(from_env.cache_in_use(data), Path::new("/home/hf/hub"));
        assert_eq!(from_env.token(), Some(Secret::new("t1")));
        assert_eq!(from_env.environment.token_file, Path::new("/home/hf/token"));

        let keys = HubConfig {
            endpoint: "https://other".to_owned(),
            token_env: "OTHER".to_owned(),
            cache: PathBuf::from("/cache"),
            ..HubConfig::default()
        };
        let from_keys = resolved(keys, &env);
        assert_eq!(from_keys.endpoint_in_use(), "https://other");
        assert_eq!(from_keys.cache_in_use(data), Path::new("/cache"));
        assert_eq!(from_keys.token(), Some(Secret::new("t2")));
        let cache = resolved(HubConfig::default(), &[("HF_HUB_CACHE", "/c"), ("HF_HOME", "/h")]);
        assert_eq!(cache.cache_in_use(data), Path::new("/c"));
    }

    #[test]
    fn the_token_file_is_that_of_the_hubs_clients() {
        let file = |env: &[(&str, &str)]| {
            resolved(HubConfig::default(), env).environment.token_file.display().to_string()
        };
        assert_eq!(file(&[("HOME", "/u")]), "/u/.cache/huggingface/token");
        assert_eq!(file(&[("HOME", "/u"), ("XDG_CACHE_HOME", "/x")]), "/x/huggingface/token");
        assert_eq!(file(&[("HF_TOKEN_PATH", "/t"), ("HF_HOME", "/h")]), "/t");
        assert_eq!(file(&[]), "");
    }

    #[test]
    fn an_endpoint_that_is_no_url_is_refused() {
        let config = HubConfig { endpoint: "huggingface.co".to_owned(), ..HubConfig::default() };
        insta::assert_snapshot!(config.check().unwrap_err().sentence(), @r#"hub.endpoint is "huggingface.co": it must be an http:// or https:// URL"#);
        let found =
            HubConfig::default().resolve(|name| (name == "HF_ENDPOINT").then(|| "x".to_owned()));
        insta::assert_snapshot!(found.unwrap_err(), @r#"HF_ENDPOINT is "x": it must be an http:// or https:// URL"#);
    }
}
