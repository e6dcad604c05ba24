use std::sync::Arc;

use proptest::prelude::*;

use super::{CacheShape, PAGE, PagePool, PromptPages, SequencePages, pages};

const SHAPE: CacheShape = CacheShape { layers: 2, heads: 3, dim: 4 };

#[derive(Clone, Copy, Debug)]
enum Action {
    AddPrompt(usize),
    AddSequence(usize, usize),
    Decode(usize),
    End(usize),
    Evict(usize),
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        (0..60_usize).prop_map(Action::AddPrompt),
        (0..8_usize, 1..60_usize).prop_map(|(prompt, limit)| Action::AddSequence(prompt, limit)),
        (0..8_usize).prop_map(Action::Decode),
        (0..8_usize).prop_map(Action::End),
        (0..8_usize).prop_map(Action::Evict),
    ]
}

proptest! {
    /// In every order of events, at most `limit` pages are reserved, every reserved page can be taken,
    /// and all pages return to the pool.
    #[test]
    fn reservations_hold_and_all_pages_return(
        actions in prop::collection::vec(action(), 1..80),
        limit in 0..12_usize,
    ) {
        let mut pool = PagePool::new(SHAPE, limit);
        let mut prompts: Vec<Arc<PromptPages>> = Vec::new();
        let mut running: Vec<(SequencePages, usize, usize)> = Vec::new();
        for action in actions {
            let before = pool.available();
            match action {
                Action::AddPrompt(len) => match PromptPages::new(&mut pool, vec![1; len]) {
                    Some(prompt) => prompts.push(Arc::new(prompt)),
                    None => {
                        prop_assert!(pages(len.saturating_sub(1)) > before);
                        prop_assert_eq!(pool.available(), before);
                    }
                },
                Action::AddSequence(prompt, limit) => {
                    let Some(prompt) = prompts.get(prompt) else { continue };
                    match SequencePages::new(&mut pool, prompt, limit) {
                        Some(sequence) => running.push((sequence, 0, limit)),
                        None => prop_assert!(pages(limit) > before),
                    }
                }
                Action::Decode(which) => {
                    let Some((sequence, len, limit)) = running.get_mut(which) else { continue };
                    let has_page = sequence.ensure_page(&mut pool);
                    prop_assert!(has_page || *len >= *limit);
                    if has_page {
                        prop_assert!(sequence.next_slot().is_some());
                        sequence.advance();
                        *len += 1;
                        prop_assert!(*len <= limit.next_multiple_of(PAGE));
                    }
                }
                Action::End(which) if which < running.len() => {
                    running.swap_remove(which).0.free(&mut pool);
                }
                Action::Evict(which) if which < prompts.len() => {
                    let prompt = prompts.swap_remove(which);
                    match Arc::try_unwrap(prompt) {
                        Ok(prompt) => prompt.free(&mut pool),
                        Err(prompt) => prompts.push(prompt),
                    }
                }
                Action::End(_) | Action::Evict(_) => {}
            }
            let held: usize = prompts.iter().map(|p| pages(PromptPages::shared_len(p.ids()))).sum();
            let reserved: usize = running.iter().map(|(_, _, limit)| pages(*limit)).sum();
            prop_assert_eq!(pool.reserved, held + reserved);
            prop_assert!(pool.reserved <= limit && pool.used + pool.free.len() <= limit);
        }
        for (sequence, ..) in running {
            sequence.free(&mut pool);
        }
        for prompt in prompts {
            Arc::into_inner(prompt).unwrap().free(&mut pool);
        }
        prop_assert_eq!((pool.reserved, pool.available()), (0, limit));
    }
}

#[test]
fn a_key_is_stored_in_a_column_and_a_value_in_a_row() {
    let mut page = vec![0.0; SHAPE.page_len()].into_boxed_slice();
    SHAPE.write(&mut page, (1, 2, 5), &[1.0, 2.0, 3.0, 4.0], &[5.0, 6.0, 7.0, 8.0]);
    let part = &page[SHAPE.head(1, 2)];
    assert_eq!((part[5], part[PAGE + 5], part[3 * PAGE + 5]), (1.0, 2.0, 4.0));
    assert_eq!(part[4 * PAGE + 5 * 4..][..4], [5.0, 6.0, 7.0, 8.0]);
    assert_eq!(page.iter().filter(|x| **x != 0.0).count(), 8);
}
