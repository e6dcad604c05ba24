//! `[server]`: the HTTP server, its keys and its limits.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use chrono::{DateTime, NaiveDate, NaiveTime, SecondsFormat, Utc};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use toml::{Table, Value};

use hone_core::config::describe::describe;
use hone_core::config::section::Parameters;
use hone_core::config::{Checked, Problem, between, label, quoted};
use hone_core::digest::Digest;
use hone_core::types::UnixMillis;
use hone_engine::ToolFormat;

hone_core::parameters! {
    /// `[server]`.
    pub struct ServerConfig {
        /// Address and port; port 0 picks a free one.
        pub bind: SocketAddr = SocketAddr::from((Ipv4Addr::LOCALHOST, 8080)),
        /// Whether `bind` may be an address beyond loopback although no key is required.
        pub insecure: bool = false,
        /// Names in the header `Host` of requests without a key, in addition to loopback and `bind`.
        pub hosts: Vec<String> = Vec::new(),
        /// Origins whose web pages may use the server; `*` is every one.
        pub cors_origins: Vec<String> = Vec::new(),
        /// Bearer keys with every scope of `/v1`.
        pub client_keys: Vec<String> = Vec::new(),
        /// Bearer keys with the scope of `/admin`.
        pub admin_keys: Vec<String> = Vec::new(),
        /// Keys with names, scopes, expiry and limits.
        pub keys: Vec<KeyConfig> = Vec::new(),
        /// A file with further entries of `keys`; empty for none.
        pub keys_file: PathBuf = PathBuf::new(),
        /// Largest request body in bytes.
        pub max_body_bytes: usize = 1 << 20 => between(1024, 1 << 30),
        /// `max_tokens` of requests that contain none.
        pub default_max_tokens: u32 = 256 => between(1, 1 << 20),
        /// How the model writes calls of functions.
        pub tool_format: ToolFormat = ToolFormat::Auto,
        /// Largest `max_tokens` of a request; 0 is the model's context.
        pub max_tokens: u32 = 0 => between(0, 1 << 20),
        /// Whether requests without the field `store` are recorded and learned from.
        pub store: bool = true,
        /// Further names of the served model: those of `model.names` from the second on.
        #[serde(skip)]
        pub model_aliases: Vec<String> = Vec::new(),
        /// Milliseconds in which a stream sends at most one event with new tokens; 0 sends each token at once.
        ///
        /// Every event costs processor time of the server and its client, which the engine lacks on a busy CPU.
        #[serde(skip)]
        pub stream_interval_ms: u64 = 40,
        /// Seconds that a stream may wait for a slot before its headers are sent.
        #[serde(skip)]
        pub stream_headers_after_seconds: u64 = 5,
        /// Seconds without an event of a stream after which a comment is sent.
        #[serde(skip)]
        pub stream_keep_alive_seconds: u64 = 15,
        /// Seconds that shutdown waits for running requests and the trainer's step together.
        pub shutdown_grace_seconds: u64 = 30 => between(0, 3600),
        /// The certificate.
        pub tls: TlsConfig = TlsConfig::default(),
        /// Limits of connections.
        pub connections: ConnectionsConfig = ConnectionsConfig::default(),
        /// Limits of graders that clients send.
        pub graders: GraderLimits = GraderLimits::default(),
    }
}

hone_core::parameters! {
    /// `[server.graders]`.
    #[derive(Eq)]
    pub struct GraderLimits {
        /// Models that graders may ask: `*` is every one, and empty those that graders of routes ask.
        ///
        /// Their requests are sent with the operator's key (`graders.api_key_env`).
        pub models: Vec<String> = Vec::new() => no_texts_or(1000),
        /// Largest number of tokens of a model's answer.
        #[serde(skip)]
        pub max_tokens: u32 = 4096,
        /// Whether Python graders may run.
        pub python: bool = false,
        /// Largest request in bytes.
        #[serde(skip)]
        pub max_bytes: usize = 256 << 10,
        /// Graders that run at once.
        #[serde(skip)]
        pub concurrency: usize = 4,
        /// Graders that may wait.
        #[serde(skip)]
        pub queue: usize = 32,
    }
}

hone_core::parameters! {
    /// `[server.connections]`.
    #[derive(Copy, Eq)]
    pub struct ConnectionsConfig {
        /// Connections at once, beside those that are reserved for probes.
        pub max: usize = 1024 => between(1, 1 << 20),
        /// Seconds that a client may take to send the head of a request.
        pub head_seconds: u64 = 10 => between(1, 86_400),
        /// Seconds that a connection may stay open without a request.
        #[serde(skip)]
        pub idle_seconds: u64 = 75,
        /// Seconds that a client may read nothing of a response that is ready.
        pub write_seconds: u64 = 30 => between(1, 86_400),
    }
}

impl ServerConfig {
    /// Checks every range, and that keys, hosts and origins are well-formed.
    ///
    /// # Errors
    /// The first invalid value, with its full key.
    pub fn check(&self) -> Checked {
        self.check_in("server.")?;
        for (name, keys) in [("client_keys", &self.client_keys), ("admin_keys", &self.admin_keys)] {
            for (i, key) in keys.iter().enumerate() {
                check_bearer(&format!("server.{name}[{i}]"), key)?;
            }
        }
        if self.client_keys.iter().any(|key| self.admin_keys.contains(key)) {
            return Err(Problem::new(
                "server.admin_keys",
                " shares a key with server.client_keys: each must have its own",
            ));
        }
        check_entries(&self.keys)?;
        self.check_distinct(&[])?;
        let all = |name: &str, list: &[String], is_valid: fn(&str) -> bool, allowed: &str| {
            let wrong = list.iter().enumerate().find(|(_, text)| !is_valid(text));
            wrong.map_or(Ok(()), |(i, text)| {
                Err(Problem::value(&format!("server.{name}[{i}]"), quoted(text), allowed))
            })
        };
        all("hosts", &self.hosts, is_host, "a host name or an address, without a port")?;
        let allowed = "\"*\" or an origin such as \"https://app.example\", without a path";
        all("cors_origins", &self.cors_origins, is_origin, allowed)?;
        if (1..self.default_max_tokens).contains(&self.max_tokens) {
            let allowed =
                format!("0, or at least server.default_max_tokens ({})", self.default_max_tokens);
            return Err(Problem::value("server.max_tokens", self.max_tokens, &allowed));
        }
        self.tls.check()?;
        self.connections.check_in("server.connections.")?;
        self.graders.check_in("server.graders.")
    }

    /// The entries of `keys` and of `keys_file`, without those of `client_keys` and `admin_keys`.
    ///
    /// # Errors
    /// If the file cannot be read, or an entry is invalid or shares its name or key with another.
    pub fn read_keys(&self) -> Result<Vec<KeyConfig>, Problem> {
        let mut entries = self.keys.clone();
        if !self.keys_file.as_os_str().is_empty() {
            let read = read_keys_file(&self.keys_file)?;
            self.check_distinct(&read)?;
            entries.extend(read);
        }
        Ok(entries)
    }

    /// Checks that all keys differ, together with those of `keys_file`.
    fn check_distinct(&self, file: &[KeyConfig]) -> Checked {
        let plain = self.client_keys.iter().chain(&self.admin_keys).map(|key| hash_key(key));
        check_keys_distinct(plain.collect(), self.keys.iter().chain(file))
    }
}

fn is_host(text: &str) -> bool {
    let is_part = |b: u8| b.is_ascii_alphanumeric() || b"-._".contains(&b);
    !text.is_empty() && text.bytes().all(is_part) || text.parse::<IpAddr>().is_ok()
}

fn is_origin(text: &str) -> bool {
    let host = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    let is_part = |b: u8| b.is_ascii_graphic() && b != b'/';
    text == "*" || host.is_some_and(|host| !host.is_empty() && host.bytes().all(is_part))
}

// `[server.tls]`: the files of the server's certificate.

/// `[server.tls]`. Empty paths mean plain HTTP.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TlsConfig {
    /// A PEM file with the server's certificate and those that lead to its root.
    pub certificate: PathBuf,
    /// A PEM file with the certificate's private key.
    pub key: PathBuf,
}

impl TlsConfig {
    /// Whether the server speaks TLS.
    pub fn is_enabled(&self) -> bool {
        !self.certificate.as_os_str().is_empty()
    }

    fn check(&self) -> Checked {
        let Self { certificate, key } = self;
        for (name, file, other, beside) in
            [("certificate", certificate, "key", key), ("key", key, "certificate", certificate)]
        {
            if file.as_os_str().is_empty() && !beside.as_os_str().is_empty() {
                let allowed = format!("the path of a file beside server.tls.{other}");
                return Err(Problem::value(&format!("server.tls.{name}"), "\"\"", &allowed));
            }
        }
        Ok(())
    }
}

// API keys: the entries of `server.keys` and of `server.keys_file`.

/// The SHA-256 of a key.
pub type KeyHash = [u8; 32];

/// What a key may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KeyScope {
    /// Completions, models, and feedback on the key's own completions.
    Chat,
    /// Feedback on every completion.
    Feedback,
    /// Graders.
    Graders,
    /// Reading below `/admin`.
    Read,
    /// `/admin`.
    Admin,
}

impl KeyScope {
    /// The scopes of `/v1`.
    pub const CLIENT: [Self; 3] = [Self::Chat, Self::Feedback, Self::Graders];
    /// The scopes that read below `/admin`.
    pub const OPERATOR: [Self; 2] = [Self::Read, Self::Admin];

    /// The name in a configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Feedback => "feedback",
            Self::Graders => "graders",
            Self::Read => "read",
            Self::Admin => "admin",
        }
    }
}

/// What a key may use; 0 is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyLimits {
    /// Requests a minute.
    pub requests_per_minute: u32,
    /// Tokens of prompts and completions a minute.
    pub tokens_per_minute: u32,
    /// Requests for completions at once.
    pub concurrency: u32,
}

/// One entry of `server.keys`.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KeyConfig {
    /// The name in logs and errors.
    pub name: String,
    /// The bearer key; empty if `sha256` is set.
    pub key: String,
    /// The SHA-256 of the bearer key as 64 hexadecimal digits; empty if `key` is set.
    pub sha256: String,
    /// What the key may do.
    pub scopes: Vec<KeyScope>,
    /// The time from which on the key is refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires: Option<KeyExpiry>,
    /// Whether the key's requests may be recorded and learned from; absent: yes. With `false` nothing of
    /// them is kept, whatever a request says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store: Option<bool>,
    /// Requests a minute; 0 is no limit.
    pub requests_per_minute: u32,
    /// Tokens of prompts and completions a minute; 0 is no limit.
    pub tokens_per_minute: u32,
    /// Requests for completions at once; 0 is no limit.
    pub concurrency: u32,
}

/// The content of `server.keys_file`.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct KeysFile {
    keys: Vec<KeyConfig>,
}

#[derive(Deserialize)]
struct KeysFileRoot {
    server: KeysFile,
}

/// The key itself stays hidden.
impl fmt::Debug for KeyConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scopes = &self.scopes;
        f.debug_struct("KeyConfig").field("name", &self.name).field("scopes", scopes).finish()
    }
}

impl KeyConfig {
    /// The limits together.
    pub fn limits(&self) -> KeyLimits {
        let Self { requests_per_minute, tokens_per_minute, concurrency, .. } = *self;
        KeyLimits { requests_per_minute, tokens_per_minute, concurrency }
    }

    /// The SHA-256 of the key; `None` if neither the key nor a well-formed hash is set.
    pub fn hash(&self) -> Option<KeyHash> {
        if self.sha256.is_empty() { Some(hash_key(&self.key)) } else { from_hex(&self.sha256) }
    }

    /// Checks one entry. `at` is its path, such as `server.keys[0]`.
    fn check(&self, at: &str) -> Checked {
        label(&format!("{at}.name"), &self.name)?;
        match (self.key.as_str(), self.sha256.as_str()) {
            ("", "") => return Err(Problem::new(at, " has no key: set key or sha256")),
            (key, "") => check_bearer(&format!("{at}.key"), key)?,
            ("", text) if from_hex(text).is_some() => {}
            ("", _) => {
                let rest = " is a hidden value: it must be 64 hexadecimal digits";
                return Err(Problem::new(format!("{at}.sha256"), rest));
            }
            _ => return Err(Problem::new(at, " has key and sha256: set one of them")),
        }
        let distinct: BTreeSet<_> = self.scopes.iter().collect();
        if self.scopes.is_empty() || distinct.len() < self.scopes.len() {
            let allowed =
                "a list of \"chat\", \"feedback\", \"graders\", \"read\" or \"admin\", each once";
            let shown = self.scopes.iter().map(|scope| format!("{:?}", scope.as_str()));
            let shown = format!("[{}]", shown.collect::<Vec<_>>().join(", "));
            return Err(Problem::value(&format!("{at}.scopes"), shown, allowed));
        }
        let limits = [
            ("requests_per_minute", self.requests_per_minute, 1_000_000),
            ("tokens_per_minute", self.tokens_per_minute, 1_000_000_000),
            ("concurrency", self.concurrency, 65_536),
        ];
        let range = |(name, value, most)| between(&format!("{at}.{name}"), value, 0, most);
        limits.into_iter().try_for_each(range)
    }
}

/// The SHA-256 of a bearer key.
pub fn hash_key(key: &str) -> KeyHash {
    Digest::new().bytes(key).finish()
}

fn from_hex(text: &str) -> Option<KeyHash> {
    let mut hash = KeyHash::default();
    if text.len() != 2 * hash.len() || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    for (byte, i) in hash.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(text.get(i..i + 2)?, 16).ok()?;
    }
    Some(hash)
}

/// Checks that a bearer key can be sent in a header. The value is a secret, so the message omits it.
fn check_bearer(at: &str, key: &str) -> Checked {
    if !key.is_empty() && key.bytes().all(|b| b.is_ascii_graphic()) {
        return Ok(());
    }
    Err(Problem::new(at, " cannot be a bearer key: it must be printable ASCII without spaces"))
}

fn check_entries(entries: &[KeyConfig]) -> Checked {
    entries.iter().enumerate().try_for_each(|(i, entry)| entry.check(&format!("server.keys[{i}]")))
}

fn read_keys_file(path: &Path) -> Result<Vec<KeyConfig>, Problem> {
    let name = path.display();
    let refuse = |rest: String| Problem::new("server.keys_file", format!(" is {name}: {rest}"));
    let inside = |problem: Problem| refuse(problem.sentence().replace("server.", ""));
    let text = std::fs::read_to_string(path)
        .map_err(|error| refuse(format!("it cannot be read: {error}")))?;
    // The message, without the line that it concerns, which may contain a key.
    let table: Table = text
        .parse()
        .map_err(|error: toml::de::Error| refuse(format!("not valid TOML: {}", error.message())))?;
    // Below `server`, so that an error hides the same values as for `server.keys`.
    let root = Value::Table(Table::from_iter([("server".to_owned(), Value::Table(table))]));
    let read: Result<KeysFileRoot, _> = serde_path_to_error::deserialize(root.clone());
    let read = read.map_err(|e| inside(describe(e.path(), e.inner().message(), &root)))?;
    check_entries(&read.server.keys).map_err(inside)?;
    Ok(read.server.keys)
}

/// Checks that no name and no key occurs twice. `hashes` are those of keys without a name.
fn check_keys_distinct<'a>(
    mut hashes: BTreeSet<KeyHash>,
    entries: impl IntoIterator<Item = &'a KeyConfig>,
) -> Checked {
    let mut names = BTreeSet::new();
    for entry in entries {
        let name = &entry.name;
        if !names.insert(name) {
            let rest = format!(" has the name {name:?} twice: each key must have its own");
            return Err(Problem::new("server.keys", rest));
        }
        if entry.hash().is_some_and(|hash| !hashes.insert(hash)) {
            let rest = format!(
                " has for {name:?} a key that another entry, server.client_keys or \
                 server.admin_keys has too: each must have its own"
            );
            return Err(Problem::new("server.keys", rest));
        }
    }
    Ok(())
}

/// The form of an expiry in a configuration.
const FORM: &str = "it must be a date such as 2027-01-31, which is its midnight in UTC, or a time \
                    with an offset such as 2027-01-31T12:00:00Z";

/// The time from which on a key is refused. A configuration has it as a date or time of TOML or as a text,
/// in RFC 3339's form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeyExpiry(DateTime<Utc>);

impl KeyExpiry {
    /// Parses a date, which is its midnight in UTC, or a time with an offset; `None` for another form.
    pub fn parse(text: &str) -> Option<Self> {
        let date = || text.parse::<NaiveDate>().ok();
        let midnight = || Some(date()?.and_time(NaiveTime::MIN).and_utc());
        let time = DateTime::parse_from_rfc3339(text).ok().map(|time| time.with_timezone(&Utc));
        time.or_else(midnight).map(Self)
    }

    /// Whether the time has come.
    pub fn has_passed(self, now: UnixMillis) -> bool {
        self.unix_millis() <= now
    }

    /// The time; 0 for one before 1970, which has passed too.
    pub fn unix_millis(self) -> UnixMillis {
        u64::try_from(self.0.timestamp_millis()).unwrap_or(0)
    }
}

impl fmt::Display for KeyExpiry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.to_rfc3339_opts(SecondsFormat::Secs, true))
    }
}

impl Serialize for KeyExpiry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for KeyExpiry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // A date of TOML arrives as its text.
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).ok_or_else(|| D::Error::custom(FORM))
    }
}

/// The section `[server]` of a configuration file.
#[cfg(test)]
pub fn parse(text: &str) -> ServerConfig {
    #[derive(Deserialize)]
    struct Sections {
        #[serde(default)]
        server: ServerConfig,
    }
    // As the reader of configurations does, so that dates arrive as texts.
    let table: toml::Table = text.parse().unwrap();
    let Sections { server } = table.try_into().unwrap();
    server.check().unwrap();
    server
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_refused_from_its_date_on() {
        let shown = |text| KeyExpiry::parse(text).map(|expiry| expiry.to_string());
        assert_eq!(shown("2027-01-31").as_deref(), Some("2027-01-31T00:00:00Z"));
        assert_eq!(shown("2027-01-31T12:00:00+02:00").as_deref(), Some("2027-01-31T10:00:00Z"));
        for wrong in ["", "2027-02-30", "2027-01-31T12:00:00", "tomorrow", "1700000000"] {
            assert_eq!(shown(wrong), None, "{wrong}");
        }
        let expiry = KeyExpiry::parse("1970-01-01T00:00:01Z").unwrap();
        assert!(!expiry.has_passed(999) && expiry.has_passed(1000));
        assert!(KeyExpiry::parse("1969-01-01").unwrap().has_passed(0));
    }
}
