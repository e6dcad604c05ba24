//! API keys: the entries of `server.keys` and of `server.keys_file`.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

use chrono::{DateTime, NaiveDate, NaiveTime, SecondsFormat, Utc};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use toml::{Table, Value};

use hone_core::config::between;
use hone_core::config::describe::describe;
use hone_core::config::{Checked, Problem, label};
use hone_core::digest::sha256;
use hone_core::types::UnixMillis;

/// The SHA-256 of a key in lower-case hexadecimal.
pub type KeyHash = String;

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
    /// `/admin`.
    Admin,
}

impl KeyScope {
    /// The scopes of `/v1`.
    pub const CLIENT: [Self; 3] = [Self::Chat, Self::Feedback, Self::Graders];

    /// The name in a configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Feedback => "feedback",
            Self::Graders => "graders",
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
            let allowed = "a list of \"chat\", \"feedback\", \"graders\" or \"admin\", each once";
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
    sha256(key)
}

fn from_hex(text: &str) -> Option<KeyHash> {
    let is_hash = text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit());
    is_hash.then(|| text.to_ascii_lowercase())
}

/// Checks that a bearer key can be sent in a header. The value is a secret, so the message omits it.
pub(super) fn check_bearer(at: &str, key: &str) -> Checked {
    if !key.is_empty() && key.bytes().all(|b| b.is_ascii_graphic()) {
        return Ok(());
    }
    Err(Problem::new(at, " cannot be a bearer key: it must be printable ASCII without spaces"))
}

pub(super) fn check_entries(entries: &[KeyConfig]) -> Checked {
    entries.iter().enumerate().try_for_each(|(i, entry)| entry.check(&format!("server.keys[{i}]")))
}

pub(super) fn read_file(path: &Path) -> Result<Vec<KeyConfig>, Problem> {
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
pub(super) fn check_distinct<'a>(
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
        // A time before 1970 has passed too.
        u64::try_from(self.0.timestamp_millis()).unwrap_or(0) <= now
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_and_times_are_read_and_others_refused() {
        let shown = |text| KeyExpiry::parse(text).map(|expiry| expiry.to_string());
        assert_eq!(shown("2027-01-31").as_deref(), Some("2027-01-31T00:00:00Z"));
        assert_eq!(shown("2027-01-31T12:00:00+02:00").as_deref(), Some("2027-01-31T10:00:00Z"));
        for wrong in ["", "2027-02-30", "2027-01-31T12:00:00", "tomorrow", "1700000000"] {
            assert_eq!(shown(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_key_is_refused_from_its_expiry_on() {
        let expiry = KeyExpiry::parse("1970-01-01T00:00:01Z").unwrap();
        assert!(!expiry.has_passed(999) && expiry.has_passed(1000));
        assert!(KeyExpiry::parse("1969-01-01").unwrap().has_passed(0));
    }
}
