package plugin

import "testing"

// TestAddressLostDuringADD: the journal is removed during an ADD, and a sweep that does not know the
// ADD releases its address. The ADD fails, and leaves nothing.
func TestAddressLostDuringADD(t *testing.T) {
	stories(t, `
	chain bridge | p1
	add first; del first
	plan p1 ADD hold; lowest; start add a; appears $dir/faulty/held/ADD.a.p1
	either the journal is there:
	or it is lost: lose journal
	shell 'rm -f $data/$network/$first'
	lose $dir/faulty/held/ADD.a.p1; fails wait add a 'was released while the ADD ran'
	plan; del a`)
}
