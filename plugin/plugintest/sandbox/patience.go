package sandbox

import "time"

// Patience is the longest time that a test waits for an event. Only a test that hangs waits so
// long, even on a machine that is ten times slower.
const Patience = 5 * time.Minute
