//! `[server]`: the HTTP server, its keys and its limits.

mod keys;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use hone_core::config::section::Parameters;
use hone_core::config::{Checked, Problem, quoted};
use hone_engine::ToolFormat;

pub use keys::{KeyConfig, KeyExpiry, KeyHash, KeyLimits, KeyScope, hash_key};

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
                keys::check_bearer(&format!("server.{name}[{i}]"), key)?;
            }
        }
        if self.client_keys.iter().any(|key| self.admin_keys.contains(key)) {
            return Err(Problem::new(
                "server.admin_keys",
                " shares a key with server.client_keys: each must have its own",
            ));
        }
        keys::check_entries(&self.keys)?;
        self.check_distinct(&[])?;
        for (i, host) in self.hosts.iter().enumerate() {
            let name = |b: u8| b.is_ascii_alphanumeric() || b"-._".contains(&b);
            let is_host = !host.is_empty() && host.bytes().all(name);
            if !is_host && host.parse::<IpAddr>().is_err() {
                let allowed = "a host name or an address, without a port";
                let key = format!("server.hosts[{i}]");
                return Err(Problem::value(&key, quoted(host), allowed));
            }
        }
        for (i, origin) in self.cors_origins.iter().enumerate() {
            let host = origin.strip_prefix("https://").or_else(|| origin.strip_prefix("http://"));
            let is_host = |host: &str| {
                !host.is_empty() && host.bytes().all(|b| b.is_ascii_graphic() && b != b'/')
            };
            if origin != "*" && !host.is_some_and(is_host) {
                let allowed = "\"*\" or an origin such as \"https://app.example\", without a path";
                let key = format!("server.cors_origins[{i}]");
                return Err(Problem::value(&key, quoted(origin), allowed));
            }
        }
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
            let read = keys::read_file(&self.keys_file)?;
            self.check_distinct(&read)?;
            entries.extend(read);
        }
        Ok(entries)
    }

    /// Checks that all keys differ, together with those of `keys_file`.
    fn check_distinct(&self, file: &[KeyConfig]) -> Checked {
        let plain = self.client_keys.iter().chain(&self.admin_keys).map(|key| hash_key(key));
        keys::check_distinct(plain.collect(), self.keys.iter().chain(file))
    }
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
