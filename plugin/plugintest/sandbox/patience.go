package sandbox

import "time"

// Patience is the longest time that a test waits for an event. It only ends tests that hang: no
// result depends on it, even on a machine that is ten times slower.
const Patience = 5 * time.Minute
