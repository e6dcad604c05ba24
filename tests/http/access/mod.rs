//! Who may use the server, and how much.

mod keys;
mod limits;
mod load;
