package known

import (
	"crypto/sha512"
	"encoding/hex"
	"fmt"
)

// Digest returns the SHA-512 of a text in hexadecimal. The reference plugins name a container's
// chains and interfaces by its first digits (plugins pkg/utils.MustFormatHashWithPrefix).
func Digest(s string) string {
	sum := sha512.Sum512([]byte(s))
	return hex.EncodeToString(sum[:])
}

// masqueradeChain is the chain of bridge and ptp (plugins pkg/utils.FormatChainName).
func masqueradeChain(network, containerID string) string {
	return "CNI-" + Digest(network + containerID)[:24]
}

// masqueradeLabels are those of bridge and ptp: of ipMasq by iptables, of macspoofchk, and of
// ipMasq by nftables (plugins pkg/ip, pkg/link).
func masqueradeLabels(network, containerID, ifname string) []string {
	return []string{
		masqueradeChain(network, containerID), "-" + containerID + "-" + ifname,
		Digest(network)[:16] + "-" + Digest(ifname + ":" + containerID)[:16],
	}
}

// portChain is portmap's chain for incoming connections.
func portChain(network, containerID string) string {
	return "CNI-DN-" + Digest(network + containerID)[:21]
}

// portLabels are those of portmap: of iptables, and of nftables, the same in all networks.
func portLabels(network, containerID, _ string) []string {
	return []string{
		portChain(network, containerID), "CNI-SN-" + Digest(network + containerID)[:21],
		fmt.Sprintf("comment %q", containerID),
	}
}

// IFBName returns the name of the device that bandwidth makes on the host (plugins
// meta/bandwidth/main.go, getIfbDeviceName).
func IFBName(network, containerID string) string {
	return "bwp" + Digest(network + containerID)[:12]
}
