//! Who may use the server, and how much.

mod connections;
mod keys;
mod limits;
mod load;
mod names;
mod probes;
mod raters;
