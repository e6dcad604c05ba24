//! Who may use the server, and how much.

mod connections;
mod keys;
mod limits;
mod load;
mod probes;
mod raters;
