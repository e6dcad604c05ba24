use super::super::*;

#[test]
fn masks_leave_the_logits_of_the_set_alone() {
    let mut allowed = AllowedTokens(SimpleVob::alloc(70));
    for id in [0, 31, 32, 63, 69, 70, 1000] {
        allowed.set(id, true);
    }
    assert_eq!(allowed.count(), 5);
    assert!(allowed.contains(69) && !allowed.contains(70) && !allowed.contains(1));
    for len in [1, 33, 70, 100] {
        let mut logits = vec![1.0; len];
        allowed.mask(&mut logits);
        let left: Vec<usize> = (0..len).filter(|id| logits[*id] == 1.0).collect();
        let wanted: Vec<usize> = [0, 31, 32, 63, 69].into_iter().filter(|id| *id < len).collect();
        assert_eq!(left, wanted);
    }
}

#[test]
fn messages_of_the_library_become_one_line() {
    assert_eq!(failure("NoExtensionBias\n<non-verbose/>"), GrammarError::DeadEnd);
    let failed = failure("lexer too complex\n<non-verbose/>");
    assert_eq!(failed, GrammarError::Failed("lexer too complex".to_owned()));
}
