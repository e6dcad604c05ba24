//! Who may use the server, and how much.

mod connections;
mod cors;
mod keys;
mod limits;
mod load;
mod names;
mod probes;
mod raters;
mod tls;
mod work;
