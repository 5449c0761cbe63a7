package sandbox

import "time"

// Patience is how long a test waits for an event. It only ends a test that hangs: even on a machine
// that is ten times slower, no result depends on it.
const Patience = 5 * time.Minute
