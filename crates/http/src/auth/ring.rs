//! The keys in use. A reload replaces them as a whole while requests run.

use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::RwLock;
use subtle::{ConditionallySelectable, ConstantTimeEq};

use super::limits::KeyLimiter;
use hone_core::config::ConfigError;

use crate::config::{KeyConfig, KeyExpiry, KeyHash, KeyScope, ServerConfig};

/// Fewest characters of a key that cannot be guessed.
const SHORT_KEY: usize = 16;

/// The keys that the server accepts.
pub struct KeyRing {
    /// The address that the server was configured to listen on, and whether it may do so without keys.
    bind: SocketAddr,
    insecure: bool,
    keys: RwLock<Arc<KeySet>>,
}

/// All keys of one moment.
#[derive(Default)]
pub(super) struct KeySet(Vec<(KeyHash, Arc<ApiKey>)>);

/// A known key.
#[derive(Debug)]
pub struct ApiKey {
    /// The name in logs and errors.
    pub name: String,
    /// First 12 hex digits of the key's SHA-256.
    pub id: String,
    pub(super) scopes: Vec<KeyScope>,
    pub(super) expires: Option<KeyExpiry>,
    /// Whether its requests may be recorded and learned from.
    pub store: bool,
    pub limiter: Arc<KeyLimiter>,
}

impl KeyRing {
    /// Reads the keys of a configuration and of its `server.keys_file`.
    ///
    /// # Errors
    /// If an entry or the file is invalid, or `server.bind` is beyond loopback and no key is required.
    pub fn load(config: &ServerConfig) -> Result<Self, ConfigError> {
        let (bind, insecure) = (config.bind, config.insecure);
        let keys = KeySet::read(config, &KeySet::default())?;
        keys.check_exposure(bind, insecure)?;
        Ok(Self { bind, insecure, keys: RwLock::new(Arc::new(keys)) })
    }

    /// Replaces the keys by those of `config`, whose other values are not used. Requests that run keep
    /// their key, and a key with the same limits what it has used of them. Returns the number of keys.
    ///
    /// # Errors
    /// As [`Self::load`]. The keys then stay as they are.
    pub fn reload(&self, config: &ServerConfig) -> Result<usize, ConfigError> {
        let before = self.current();
        let keys = KeySet::read(config, &before)?;
        keys.check_exposure(self.bind, self.insecure)?;
        keys.check_protection(&before)?;
        let count = keys.0.len();
        *self.keys.write() = Arc::new(keys);
        Ok(count)
    }

    /// Number of keys that may rate.
    pub fn raters(&self) -> usize {
        let keys = self.current();
        keys.0
            .iter()
            .filter(|(_, key)| key.has_one_of(&[KeyScope::Chat, KeyScope::Feedback]))
            .count()
    }

    pub(super) fn current(&self) -> Arc<KeySet> {
        Arc::clone(&self.keys.read())
    }
}

impl KeySet {
    /// The keys of a configuration. Those that `before` has keep what they have used of their limits.
    fn read(config: &ServerConfig, before: &Self) -> Result<Self, ConfigError> {
        let entries = config.read_keys();
        let entries = entries.map_err(|problem| ConfigError::Invalid(problem.sentence()))?;
        let plain = |list: &'static str, keys: &[String], scopes: &[KeyScope]| {
            let named = keys.iter().enumerate().map(|(i, key)| KeyConfig {
                name: format!("{list}[{i}]"),
                key: key.clone(),
                scopes: scopes.to_vec(),
                ..KeyConfig::default()
            });
            named.collect::<Vec<_>>()
        };
        let clients = plain("client_keys", &config.client_keys, &KeyScope::CLIENT);
        let admins = plain("admin_keys", &config.admin_keys, &[KeyScope::Admin]);
        let all = clients.iter().chain(&admins).chain(&entries);
        let known = |entry: &KeyConfig| {
            let hash = entry.hash()?;
            if (1..SHORT_KEY).contains(&entry.key.len()) {
                tracing::warn!(
                    key = entry.name,
                    "the key is short enough to be guessed: use {SHORT_KEY} random characters"
                );
            }
            Some((hash, ApiKey::new(entry, &hash, before.find(&hash))))
        };
        Ok(Self(all.filter_map(known).collect()))
    }

    /// Refuses an address that others can reach if the server would answer them without a key.
    fn check_exposure(&self, bind: SocketAddr, insecure: bool) -> Result<(), ConfigError> {
        if insecure || bind.ip().to_canonical().is_loopback() || self.has_scope(&KeyScope::CLIENT) {
            return Ok(());
        }
        Err(ConfigError::Invalid(format!(
            "server.bind is {bind}: it must be a loopback address, because no key is required: set \
             server.client_keys, server.keys or server.keys_file, or accept every client with \
             server.insecure or --insecure"
        )))
    }

    /// Refuses a reload that opens routes: a file that is empty while it is written must not; a restart can.
    fn check_protection(&self, before: &Self) -> Result<(), ConfigError> {
        for (path, scopes) in [("/v1", &KeyScope::CLIENT[..]), ("/admin", &[KeyScope::Admin][..])] {
            if before.has_scope(scopes) && !self.has_scope(scopes) {
                return Err(ConfigError::Invalid(format!(
                    "the new keys have none for {path}, which would then need no key: restart to remove \
                     all keys"
                )));
            }
        }
        Ok(())
    }

    /// Whether a key has one of `scopes`, so that the routes of these scopes require a key.
    pub(super) fn has_scope(&self, scopes: &[KeyScope]) -> bool {
        self.0.iter().any(|(_, key)| key.has_one_of(scopes))
    }

    /// The key with a hash. Every hash is compared to its end, so that the time reveals nothing about the keys.
    pub(super) fn find(&self, presented: &KeyHash) -> Option<&Arc<ApiKey>> {
        let mut found = 0_u64;
        for (number, (hash, _)) in (1_u64..).zip(&self.0) {
            found.conditional_assign(&number, hash.ct_eq(presented));
        }
        let index = usize::try_from(found).ok()?.checked_sub(1)?;
        self.0.get(index).map(|(_, key)| key)
    }
}

impl ApiKey {
    fn new(entry: &KeyConfig, hash: &KeyHash, before: Option<&Arc<Self>>) -> Arc<Self> {
        let (name, limits) = (&entry.name, entry.limits());
        let kept = before.map(|key| &key.limiter).filter(|limiter| limiter.is_of(name, limits));
        Arc::new(Self {
            name: name.clone(),
            id: hash.iter().take(6).map(|byte| format!("{byte:02x}")).collect(),
            scopes: entry.scopes.clone(),
            expires: entry.expires,
            store: entry.store.unwrap_or(true),
            limiter: kept.map_or_else(|| KeyLimiter::new(name, limits), Arc::clone),
        })
    }

    /// Whether the key has one of `scopes`, or no scope is required.
    pub fn has_one_of(&self, scopes: &[KeyScope]) -> bool {
        scopes.is_empty() || scopes.iter().any(|scope| self.scopes.contains(scope))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{hash_key, parse as config};

    const ONE: &str = "[[server.keys]]\nname = 'web'\nkey = 'sesame'\nscopes = ['chat']";

    #[test]
    fn keys_are_found_by_their_hash() {
        let text =
            format!("[server]\nclient_keys = ['alice', 'bob']\nadmin_keys = ['root']\n{ONE}");
        let keys = KeyRing::load(&config(&text)).unwrap().current();
        let name = |key: &str| keys.find(&hash_key(key)).map(|key| key.name.as_str());
        assert_eq!(name("alice"), Some("client_keys[0]"));
        assert_eq!(name("bob"), Some("client_keys[1]"));
        assert_eq!(name("root"), Some("admin_keys[0]"));
        assert_eq!(name("sesame"), Some("web"));
        for unknown in ["", "alic", "alicee", "web"] {
            assert_eq!(name(unknown), None, "{unknown}");
        }
        assert_eq!(keys.find(&hash_key("alice")).unwrap().id, "2bd806c97f0e");
        assert!(KeySet::default().find(&hash_key("alice")).is_none());
    }

    #[test]
    fn a_reload_replaces_all_keys_or_none() {
        let ring = KeyRing::load(&config(ONE)).unwrap();
        let has = |key: &str| ring.current().find(&hash_key(key)).is_some();
        let before = ring.current();
        assert_eq!(ring.reload(&config(&ONE.replace("sesame", "open"))).unwrap(), 1);
        assert!(has("open") && !has("sesame") && before.find(&hash_key("sesame")).is_some());
        let missing = config("[server]\nkeys_file = 'no-such-file.toml'");
        let error = ring.reload(&missing).unwrap_err().to_string();
        assert!(error.contains("no-such-file.toml"), "{error}");
        let error = ring.reload(&config("")).unwrap_err().to_string();
        assert!(error.contains("/v1"), "{error}");
        assert!(has("open"));
    }

    #[test]
    fn a_reload_keeps_what_a_key_has_used_of_the_same_limits() {
        let limited = |requests: u32| config(&format!("{ONE}\nrequests_per_minute = {requests}"));
        let ring = KeyRing::load(&limited(1)).unwrap();
        let now = std::time::Instant::now();
        let asks = || {
            let key = Arc::clone(ring.current().find(&hash_key("sesame")).unwrap());
            key.limiter.count_request(now).is_ok()
        };
        assert!(asks() && !asks());
        ring.reload(&limited(1)).unwrap();
        assert!(!asks());
        ring.reload(&limited(2)).unwrap();
        assert!(asks() && asks() && !asks());
    }

    #[test]
    fn addresses_beyond_loopback_require_keys() {
        let bound = |bind: &str, more: &str| {
            let text = format!("[server]\nbind = '{bind}'\n{more}");
            KeyRing::load(&config(&text)).map_err(|error| error.to_string())
        };
        for bind in ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
            assert!(bound(bind, "").is_ok(), "{bind}");
        }
        for bind in ["0.0.0.0:1", "[::]:1", "192.0.2.7:1"] {
            let error = bound(bind, "admin_keys = ['root']").err().unwrap();
            assert!(error.contains(bind) && error.contains("--insecure"), "{error}");
            assert!(bound(bind, "client_keys = ['alice']").is_ok());
            assert!(bound(bind, ONE).is_ok());
            let ring = bound(bind, "insecure = true").unwrap();
            assert!(ring.reload(&config("")).is_ok());
            // A reload must not open a server that others can reach.
            let ring = bound(bind, ONE).unwrap();
            assert!(ring.reload(&config("")).is_err());
            assert!(ring.current().has_scope(&KeyScope::CLIENT));
        }
    }
}
