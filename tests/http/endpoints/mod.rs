//! Endpoints beside chat completions and feedback on one of them, and what is kept of requests.

mod storing;
